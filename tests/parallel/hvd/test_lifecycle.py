"""Starting, stopping, starting again, and what the others see of a worker that ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from time_limits import wait_until
from worker_group import on_hvd_workers, on_workers, run_in_workers

from lockstep import hvd
from lockstep.world.world import World


@pytest.mark.parametrize("turns", [5, pytest.param(50, marks=pytest.mark.long)])
@on_workers(2)
def test_init_and_shutdown_work_many_times(turns: int) -> None:
    before, sums = threading.active_count(), []
    for turn in range(turns):
        hvd.init()
        sums.append(hvd.allreduce(torch.tensor(float(hvd.rank() + turn)), op=hvd.Sum).item())
        hvd.shutdown()
    wait_until(lambda: threading.active_count() == before)
    assert sums == [1.0 + 2 * turn for turn in range(turns)]


@on_workers(2)
def test_init_twice_is_once_and_shutdown_twice_too(world: World) -> None:
    hvd.shutdown()
    hvd.init()
    hvd.init()
    facts = [hvd.size(), hvd.rank(), hvd.local_size(), hvd.local_rank(), hvd.cross_size(), hvd.cross_rank()]
    hvd.shutdown()
    hvd.shutdown()
    assert facts == [2, world.rank, 2, world.rank, 1, 0]
    assert not hvd.is_initialized()


def _kill_itself() -> None:
    """Killed by another worker, it could hold a lock that the others wait for."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_fails_the_others() -> None:
    size = 3
    all_ready = multiprocessing.get_context("fork").Barrier(size)

    def work(world: World) -> None:
        hvd.init()
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == size - 1:
            all_ready.wait(60)
            _kill_itself()
        name, elements = ("never", 3) if hvd.rank() == 0 else ("other", 3_000_000)
        handle = hvd.allreduce_async(torch.ones(elements), name=name)
        all_ready.wait(60)
        with pytest.raises(hvd.HorovodInternalError, match=r"shut down"):
            hvd.synchronize(handle)
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(1))

    with pytest.raises(AssertionError, match="ended without an answer") as failure:
        run_in_workers(size, work)
    assert str(failure.value).count("worker ") == 1, "only the killed worker may fail"


def test_killed_worker_is_noticed_without_communication() -> None:
    all_ready = multiprocessing.get_context("fork").Barrier(3)

    def submit() -> None:
        while True:
            time.sleep(0.05)
            hvd.allreduce_async(torch.ones(1))

    def work(world: World) -> None:
        hvd.init()
        hvd.allreduce(torch.ones(1))
        all_ready.wait(60)
        if hvd.rank() == 1:
            _kill_itself()
        with pytest.raises(hvd.HorovodInternalError):
            submit()

    with pytest.raises(AssertionError, match="ended without an answer") as failure:
        run_in_workers(3, work)
    assert str(failure.value).count("worker ") == 1


@on_workers(3)
def test_pending_operations_fail_when_a_worker_shuts_down(rank: int) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if rank:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 called hvd\.shutdown"):
            hvd.allreduce(torch.ones(1), name="late")
    hvd.shutdown()


@pytest.mark.parametrize("turns", [6, pytest.param(40, marks=pytest.mark.long)])
@on_workers(3)
def test_last_operation_succeeds_although_a_peer_leaves_at_once(turns: int) -> None:
    results = []
    for turn in range(turns):
        hvd.init()
        tensor = torch.full((100_000 if turn % 2 else 1,), float(hvd.rank()))
        results.append(hvd.allreduce(tensor, op=hvd.Sum)[-1].item())
        hvd.shutdown()
    assert results == [3.0] * turns


@on_hvd_workers(2)
def test_abandoned_handles_hang_nothing() -> None:
    for turn in range(50):
        hvd.allreduce_async(torch.ones(1000), name=f"abandoned.{turn}")
    if hvd.rank() == 0:
        hvd.allreduce_async(torch.ones(1), name="only here")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    hvd.shutdown()


@on_workers(3)
def test_a_part_of_the_workers_can_be_the_whole(world: World) -> None:
    hvd.init(comm=[0, 2] if world.rank != 1 else [1])
    facts = [hvd.size(), hvd.rank(), hvd.allreduce(torch.tensor(float(world.rank)), op=hvd.Sum).item()]
    assert facts == [[2, 0, 2.0], [1, 0, 1.0], [2, 1, 2.0]][world.rank]
    places = [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    assert places == [[0, 2, 0, 1], [0, 1, 0, 1], [1, 2, 0, 1]][world.rank]
