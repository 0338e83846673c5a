"""One node's agent: torchrun's elastic agent, with a rendezvous that listens on loopback alone.

The agent starts the workers, watches them and ends all of them when one fails. torch's own rendezvous would listen on
every address; here the launcher serves the job's store on a loopback socket, and the workers are its clients.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import uuid
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.launch.plan import LOOPBACK, LocalPlan


class LoopbackRendezvous(RendezvousHandler):
    """The meeting point of one agent with itself: a store on 127.0.0.1, served by this process."""

    def __init__(self) -> None:
        listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        self._port: int = listener.getsockname()[1]
        self._id = uuid.uuid4().hex
        self._closed = False
        self._store = TCPStore(
            LOOPBACK,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=5),
            master_listen_fd=listener.detach(),  # the store owns the socket from here on
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def get_backend(self) -> str:
        return "lockstep-loopback"

    def get_run_id(self) -> str:
        return self._id

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._closed = True
        return True


def run_local(plan: LocalPlan) -> int:
    """Carry out a plan and wait for its end.

    Returns:
        The job's exit code: 0, or that of the worker that failed first (128 + N where signal N ended it).
    """
    os.environ.update(plan.environment)
    _silence_agent()
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), _raise_signal)
    with TemporaryDirectory(prefix="lockstep-") as folder:
        spec = WorkerSpec(
            role="worker",
            local_world_size=plan.workers,
            entrypoint=plan.command[0],
            args=plan.command[1:],
            rdzv_handler=LoopbackRendezvous(),
            max_restarts=0,
            monitor_interval=0.1,
        )
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=folder), shutdown_timeout=10)
        try:
            result = agent.run()
        except SignalException as error:
            print(f"\nlockstep: stopped by {error.sigval.name}; all workers have ended", file=sys.stderr)
            return 128 + int(error.sigval)
        return _report(result, plan.workers)


def _silence_agent() -> None:
    """torch's agent logs each failure in its own words, too; `_report` says it once."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _raise_signal(number: int, frame: Any) -> None:
    raise SignalException(f"launcher got signal {number}", signal.Signals(number))


def _report(result: RunResult, workers: int) -> int:
    """Say which worker failed first, and return the job's exit code."""
    if not result.is_failed():
        return 0
    rank, failure = min(result.failures.items(), key=lambda item: _order_of_failure(item[1]))
    error = _error_of(failure)
    code = int(error.get("exit_code", failure.exitcode))  # a worker that has failed may be ended while it closes
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    print(f"lockstep: worker {rank} of {workers} {how}; the others were stopped", file=sys.stderr)
    if "text" in error:
        print(error["text"], file=sys.stderr)
    return 128 - code if code < 0 else code


def _order_of_failure(failure: ProcessFailure) -> tuple[int, int]:
    """Most telling first: an error of the worker's own, a signal, then the loss of a peer, which only follows."""
    error = _error_of(failure)
    kind = 1 if not error else 2 if error.get("lost_peer") else 0
    return kind, int(error.get("time_ns", 0))


def _error_of(failure: ProcessFailure) -> dict[str, Any]:
    try:
        error = json.loads(Path(failure.error_file).read_text())["lockstep"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
