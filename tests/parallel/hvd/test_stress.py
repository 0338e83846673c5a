"""Many operations from many threads, in another order on each worker, and nothing left behind."""

from __future__ import annotations

import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from worker_group import on_hvd_workers, on_workers

from lockstep import hvd
from lockstep.hvd.ops import submission

THREADS = 8


def _operate(index: int, rank: int, size: int) -> None:
    """One operation, chosen by its number, with its result checked."""
    name, kind = f"op{index}", index % 7
    length = 1 + (index * 37) % 700
    mine = torch.full((length,), float(rank + index))
    total = sum(float(other + index) for other in range(size))
    if kind < 3:
        call = (hvd.allreduce_async, hvd.allreduce_async_)[kind % 2]
        result = hvd.synchronize(call(mine, name=name, op=hvd.Sum))
        assert result.tolist() == [total] * length
    elif kind == 3:
        result = hvd.allgather(mine[: rank + 1], name=name)
        assert result.tolist() == [float(other + index) for other in range(size) for _ in range(min(other + 1, length))]
    elif kind == 4:
        assert hvd.broadcast(mine, index % size, name=name)[0].item() == index % size + index
    elif kind == 5:
        results = hvd.grouped_allreduce([mine, mine.double() * 2], name=name, op=hvd.Max)
        assert [part[0].item() for part in results] == [size - 1.0 + index, 2 * (size - 1.0 + index)]
    else:
        received, splits = hvd.synchronize(hvd.alltoall_async(mine.repeat(size), name=name))
        assert splits.tolist() == [length] * size
        assert received[::length].tolist() == [float(other + index) for other in range(size)]


@pytest.mark.parametrize("operations", [400, pytest.param(2000, marks=pytest.mark.long)])
@on_workers(2)
def test_mixed_operations_from_8_threads_leave_no_leak(operations: int) -> None:
    os.environ |= {"HOROVOD_STALL_CHECK_DISABLE": "1", "LOCKSTEP_STRAGGLER_SECONDS": "0"}
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    process = psutil.Process()

    def everything() -> None:
        # Threads block on their operation, so the orders may differ only as far as there are threads.
        order = list(range(operations))
        shuffler = random.Random(rank)
        for start in range(0, operations, THREADS):
            part = order[start : start + THREADS]
            shuffler.shuffle(part)
            order[start : start + THREADS] = part
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, operations, THREADS):
                list(pool.map(lambda index: _operate(index, rank, size), order[start : start + THREADS]))

    everything()
    gc.collect()
    threads, memory, files = threading.active_count(), process.memory_info().rss, process.num_fds()
    everything()
    gc.collect()
    assert threading.active_count() <= threads
    assert process.num_fds() <= files
    grown = process.memory_info().rss - memory
    assert grown < 20 << 20
    assert not submission._handles
    hvd.shutdown()


@on_hvd_workers(2)
def test_thousands_of_pending_operations_in_opposite_orders() -> None:
    names = [f"t{index}" for index in range(1500)]
    if hvd.rank() == 1:
        names.reverse()
    handles = {name: hvd.allreduce_async(torch.full((3,), float(name[1:])), name=name) for name in names}
    results = {name: hvd.synchronize(handle)[0].item() for name, handle in handles.items()}
    assert all(value == float(name[1:]) for name, value in results.items())
    assert len(results) == 1500
