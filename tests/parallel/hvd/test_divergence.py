"""What differs between workers, and must not matter, or must fail on all of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import wrap
from worker_group import on_hvd_workers, on_workers, run_in_workers

from lockstep import hvd
from lockstep.world.world import World


@on_workers(2)
def test_the_fusion_threshold_is_rank_0s(world: World) -> None:
    os.environ["HOROVOD_FUSION_THRESHOLD"] = str(4096 * (1 + 100 * world.rank))
    hvd.init()
    handles = [hvd.allreduce_async(torch.full((500,), float(i)), name=str(i)) for i in range(40)]
    assert [hvd.synchronize(handle)[0].item() for handle in handles] == [float(i) for i in range(40)]


@on_hvd_workers(1)
def test_threads_of_a_lone_worker_do_not_mix_their_tensors() -> None:
    wrong = []

    def reduce(value: int) -> None:
        for turn in range(100):
            tensors = [torch.full((60_000,), float(value)), torch.full((60_000,), -float(value))]
            results = hvd.grouped_allreduce(tensors, name=f"{value}.{turn}")
            wrong.extend(one for one, other in zip(results, tensors, strict=True) if not one.equal(other))

    threads = [threading.Thread(target=reduce, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@on_hvd_workers(2)
def test_an_object_that_cannot_be_pickled_fails_on_all(rank: int) -> None:
    for call in (hvd.broadcast_object, hvd.allgather_object):
        with pytest.raises(hvd.HorovodInternalError if rank else TypeError, match="pickle"):
            call(1 if rank else threading.Lock())
    assert hvd.broadcast_object("fine") == "fine"


@on_workers(2)
def test_a_default_device_changes_nothing() -> None:
    torch.set_default_device("meta")
    try:
        hvd.init()
        assert hvd.allreduce(torch.ones(3, device="cpu")).tolist() == [1.0, 1.0, 1.0]
        assert hvd.broadcast_object([1]) == [1]
        assert hvd.allgather_object(hvd.rank()) == [0, 1]
    finally:
        torch.set_default_device(None)


def test_forked_children_do_not_hide_the_end_of_their_parent() -> None:
    def work(world: World) -> float:
        hvd.init()
        pids = [os.getpid()]
        if hvd.rank() == 1:
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10_000,), daemon=True)
            process.start()
            pids.append(process.pid or 0)
            assert hvd.is_initialized()
        _, parent, child = hvd.allgather(torch.tensor(pids)).tolist()
        if hvd.rank() == 0:
            os.kill(parent, signal.SIGKILL)
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 disconnected"):
            hvd.allreduce(torch.ones(1), name="after")
        os.kill(child, signal.SIGKILL)  # it holds the pipe for the worker's result open
        return 0.0

    with pytest.raises(AssertionError, match=r"worker 1") as failure:
        run_in_workers(2, work)
    assert "worker 0" not in str(failure.value)


@on_workers(2)
def test_forked_child_knows_its_rank_without_connections() -> None:
    hvd.init(process_sets="dynamic")
    hvd.add_process_set(only := hvd.ProcessSet([1]))
    optimizer = wrap([parameter := torch.ones(2, requires_grad=True)])
    facts = known(only)
    parameter.sum().backward()
    optimizer.step()
    answers, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(sender, only, optimizer, parameter))
    process.start()
    assert answers.recv() == facts
    for call, error in answers.recv().items():
        assert f"Process {process.pid} was forked from rank {hvd.rank()}" in error, call
    assert not answers.recv()
    process.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


def known(only: hvd.ProcessSet) -> list[Any]:
    own = [hvd.is_initialized(), hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank()]
    sets = [hvd.global_process_set.rank(), hvd.global_process_set.size(), only.included(), only.size()]
    return [*own, hvd.cross_size(), *sets]


def child(sender: Any, only: hvd.ProcessSet, optimizer: Any, parameter: torch.Tensor) -> None:
    """Send what a forked child knows, the errors of what it cannot do, and whether it is initialized after shutdown."""
    hvd.init()  # does nothing, as in the parent
    sender.send(known(only))
    one = torch.ones(1)
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: hvd.allreduce(one),
        "grouped_allgather": lambda: hvd.grouped_allgather([one]),
        "broadcast_object": lambda: hvd.broadcast_object(1),
        "barrier": hvd.barrier,
        "join": hvd.join,
        "backward": parameter.sum().backward,
        "step": optimizer.step,
        "wrap": lambda: wrap([parameter]),
        "add_process_set": lambda: hvd.add_process_set([0]),
        "remove_process_set": lambda: hvd.remove_process_set(only),
    }
    sender.send({name: error_of(call) for name, call in calls.items()})
    hvd.shutdown()
    sender.send(hvd.is_initialized())


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (hvd.HorovodInternalError, ValueError) as error:
        return str(error)
    return "no error"


@on_workers(2)
def test_error_in_one_workers_engine_ends_the_operation_on_all(rank: int) -> None:
    hvd.init()
    if rank == 1:  # as if this worker alone had run out of memory
        import lockstep.hvd.engine.fusion as module

        def fail(*_: Any) -> None:
            raise MemoryError("no memory left")

        module.reduce_fused = fail  # type: ignore[assignment]
    reason = "no memory left" if rank else "rank 1|another worker"
    with pytest.raises(hvd.HorovodInternalError, match=f"(?s)shut down.*({reason})"):
        hvd.allreduce(torch.ones(100_000), name="x")
