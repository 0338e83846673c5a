"""The part of `horovod.spark.run` that runs in a task of its barrier stage.

The function is called in a new process of the task, which leaves nothing in the task's Python, where Spark runs other
tasks later: no environment variables, CUDA contexts, threads or connections.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

import cloudpickle
from pyspark import BarrierTaskContext

from horovod.runner.worker_environment import own_gpu_variables, worker_variables
from horovod.runner.worker_environment import own_gpus as get_available_devices
from lockstep.launch.node.processes import end_with_parent
from lockstep.launch.plan.timings import Timings
from lockstep.launch.plan.worker_variables import handed_on
from lockstep.world.interfaces import LOOPBACK
from lockstep.world.rendezvous import serve_store

__all__ = ["get_available_devices", "run_task"]

FIRST_ERROR = "lockstep/spark/error"  # in the store
END_OF_ERROR = "\n[end of the worker's error]"


def run_task(
    _: Iterator[int], call: bytes, env: Mapping[str, str], interfaces: Sequence[str]
) -> Iterator[tuple[int, bytes]]:
    """Yield the rank and pickled result of this task's worker. Rank 0's task serves the job's store.

    Args:
        call: The pickled call, from `pack_call`.
        env: Additional environment variables.
        interfaces: The network interfaces to use between hosts; empty for any.
    """
    context = BarrierTaskContext.get()
    partition, resources = context.partitionId(), context.resources()
    host = context.getTaskInfos()[partition].address.rpartition(":")[0].strip("[]")
    gpus = list(resources["gpu"].addresses) if "gpu" in resources else []
    tasks = [(*json.loads(text), task) for task, text in enumerate(context.allGather(json.dumps([host, gpus])))]
    names = list(dict.fromkeys(name for name, _, _ in tasks))
    hosts, devices, partitions = zip(*sorted(tasks, key=lambda task: names.index(task[0])), strict=True)
    rank, store, served = partitions.index(partition), None, ""
    if rank == 0:
        address = host if len(names) > 1 else LOOPBACK
        store, port = serve_store(address)
        served = json.dumps([address, port])
    address, port = json.loads("".join(context.allGather(served)))
    variables = {**handed_on(os.environ), **worker_variables(hosts, devices, address, port, interfaces)[rank], **env}
    variables |= own_gpu_variables(gpus, variables)
    result = _run_worker(rank, call, variables)
    context.barrier()
    del store  # the workers needed it until now
    return iter([(rank, result)])


def _run_worker(rank: int, call: bytes, variables: Mapping[str, str]) -> bytes:
    """Make the call in a new process, and return its pickled result.

    Raises:
        RuntimeError: It failed. Spark then ends the stage.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")  # a fork would fail if an earlier task has used CUDA
    worker = context.Process(target=_work, args=(os.getpid(), there, call, variables))
    worker.start()
    there.close()
    try:
        result, error = here.recv()
    except EOFError:
        worker.join()
        code = worker.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        error = f"worker {rank} {how}"
    if error:
        raise RuntimeError(error + END_OF_ERROR)
    worker.join()
    return bytes(result)


def _work(parent: int, pipe: Connection, call: bytes, variables: Mapping[str, str]) -> None:
    """Make the call, and send its pickled result, or its error."""
    if not end_with_parent(parent, signal.SIGKILL):
        return
    os.environ.clear()
    os.environ.update(variables)
    try:
        path, packed = pickle.loads(call)
        sys.path += [entry for entry in path if entry not in sys.path]
        function, args, kwargs = pickle.loads(packed)
        result = cloudpickle.dumps(function(*args, **kwargs))
    except BaseException:
        text = traceback.format_exc().rstrip()
        print(text, file=sys.stderr)
        pipe.send((b"", _first_error(f"worker {variables['RANK']} failed:\n{text}", variables)))
        while True:  # until the task ends: the exit would make other workers fail, too
            signal.pause()
    atexit._run_exitfuncs()  # multiprocessing does not; among them is hvd.shutdown
    pipe.send((result, ""))


def _first_error(error: str, variables: Mapping[str, str]) -> str:
    """Return the error of the worker that failed first, which may be the cause of this worker's."""
    from torch.distributed import TCPStore

    address, port, limit = variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), timedelta(seconds=Timings().connect)
    try:
        first = TCPStore(address, port, is_master=False, timeout=limit).compare_set(FIRST_ERROR, "", error)
        return bytes(first).decode()
    except RuntimeError:  # rank 0's task has ended: Spark reports that, and ends this one
        time.sleep(Timings().caller_end)
        return error
