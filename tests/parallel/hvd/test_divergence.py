"""What differs between workers, and must not matter, or must fail on all of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from worker_group import on_hvd_workers, on_workers, run_in_workers

from lockstep import hvd
from lockstep.world.world import World


@on_workers(2)
def test_the_fusion_threshold_is_rank_0s(world: World) -> None:
    os.environ["HOROVOD_FUSION_THRESHOLD"] = str(4096 * (1 + 100 * world.rank))
    hvd.init()
    handles = [hvd.allreduce_async(torch.full((500,), float(i)), name=str(i)) for i in range(40)]
    assert [hvd.synchronize(handle)[0].item() for handle in handles] == [float(i) for i in range(40)]


@on_hvd_workers(2)
def test_in_place_on_one_worker_only_is_fine() -> None:
    call = hvd.allreduce_async_ if hvd.rank() else hvd.allreduce_async
    handles = [call(torch.full((5000,), float(i)), name=f"a{i}") for i in range(10)]
    handles += [hvd.allreduce_async(torch.full((5000,), float(i)), name=f"b{i}") for i in range(10)]
    assert [hvd.synchronize(handle)[-1].item() for handle in handles] == [float(i) for i in range(10)] * 2


@on_hvd_workers(2)
def test_group_of_one_does_not_match_a_single_tensor() -> None:
    call = (
        lambda: hvd.allreduce(torch.ones(7), name="x"),
        lambda: hvd.grouped_allreduce([torch.ones(7)], name="x"),
    )
    with pytest.raises(hvd.HorovodInternalError, match="group"):
        call[hvd.rank()]()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


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


def test_an_object_that_cannot_be_pickled_fails_on_all() -> None:
    def work(world: World) -> list[Any]:
        hvd.init()
        errors = []
        for call in (hvd.broadcast_object, hvd.allgather_object):
            with pytest.raises(Exception, match="pickle") as error:
                call(threading.Lock() if hvd.rank() == 0 else 1)
            errors.append(type(error.value).__name__)
        return [errors, hvd.broadcast_object("fine")]

    first, second = run_in_workers(2, work)
    assert first == [["TypeError", "TypeError"], "fine"]
    assert second == [["HorovodInternalError", "HorovodInternalError"], "fine"]


def test_a_default_device_changes_nothing() -> None:
    def work(world: World) -> list[Any]:
        torch.set_default_device("meta")
        try:
            hvd.init()
            tensor = torch.ones(3, device="cpu")
            return [hvd.allreduce(tensor).tolist(), hvd.broadcast_object([1]), hvd.allgather_object(hvd.rank())]
        finally:
            torch.set_default_device(None)

    assert run_in_workers(2, work) == [[[1.0, 1.0, 1.0], [1], [0, 1]]] * 2


def test_forked_children_do_not_hide_the_end_of_their_parent() -> None:
    def work(world: World) -> float:
        hvd.init()
        pids = hvd.allgather(torch.tensor([os.getpid()])).tolist()
        if hvd.rank() == 1:
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(9,), daemon=True)
            child.start()
            assert hvd.is_initialized()
        hvd.barrier()
        if hvd.rank() == 0:
            os.kill(pids[1], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 disconnected"):
            hvd.allreduce(torch.ones(1), name="after")
        assert time.monotonic() - start < 8
        return 0.0

    with pytest.raises(AssertionError, match=r"worker 1") as failure:
        run_in_workers(2, work)
    assert "worker 0" not in str(failure.value)


@on_hvd_workers(2)
def test_a_forked_child_is_not_in_the_job() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not hvd.is_initialized() else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


@on_workers(3)
def test_a_part_of_the_workers_counts_its_own_places(world: World) -> None:
    hvd.init(comm=[0, 2] if world.rank != 1 else [1])
    places = [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    assert places == [[0, 2, 0, 1], [0, 1, 0, 1], [1, 2, 0, 1]][world.rank]


def test_error_in_one_workers_engine_ends_the_operation_on_all() -> None:
    def work(world: World) -> str:
        hvd.init()
        if hvd.rank() == 1:  # as if this worker alone had run out of memory
            import lockstep.hvd.ops.allreduce as module

            def fail(*_: Any) -> None:
                raise MemoryError("no memory left")

            module.reduce_fused = fail  # type: ignore[assignment]
        with pytest.raises(hvd.HorovodInternalError, match="shut down") as error:
            hvd.allreduce(torch.ones(100_000), name="x")
        return str(error.value)

    first, second = run_in_workers(2, work)
    assert "rank 1" in first or "another worker" in first
    assert "no memory left" in second
