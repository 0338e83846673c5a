"""Workers that have run out of data go along with zeros until all have joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from worker_group import on_hvd_workers

from lockstep import hvd
from lockstep.hvd.exceptions import HorovodInternalError


@on_hvd_workers(2, 3)
def test_the_joined_contribute_zeros_of_any_shape_and_dtype(rank: int, size: int) -> int:
    """Rank 0 joins at once; the others reduce 5 on each."""
    others = size - 1
    reductions = {hvd.Average: 5 * others / size, hvd.Sum: 5 * others, hvd.Min: 0, hvd.Max: 5, hvd.Product: 0}
    if rank > 0:
        for op, wanted in reductions.items():
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64):
                for count in (2, 1200, 300_000) if dtype == torch.float32 else (2, 1200):
                    result = hvd.allreduce(torch.full((count, 1), 5, dtype=dtype), op=op)
                    expected = torch.full((count, 1), wanted).to(dtype)
                    torch.testing.assert_close(result, expected)
        assert hvd.allreduce(torch.tensor(5.0), op=hvd.Sum, name="named").item() == 5 * others
        assert hvd.allreduce(torch.ones(0)).shape == (0,)
        one, two = hvd.grouped_allreduce([torch.full((3,), 5.0), torch.full((2, 2), 5)], op=hvd.Sum)
        assert (one == 5.0 * others).all()
        assert (two == 5 * others).all()
        mine = torch.full((3,), 5.0)
        hvd.allreduce_(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        assert (mine == 5.0 * others).all()
        assert hvd.allreduce(torch.tensor([True]), op=hvd.Min).item() is False
        handles = [hvd.allreduce_async(torch.full((7,), 5.0), name=f"t{i}", op=hvd.Sum) for i in range(300)]
        assert all((hvd.synchronize(handle) == 5.0 * others).all() for handle in handles)
        hvd.barrier()
    last = hvd.join()
    assert last > 0
    return last


@on_hvd_workers(3, order=[(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_join_returns_the_rank_that_joined_last(rank: int, size: int, order: tuple[int, ...]) -> None:
    for _ in range(3):
        for step in range(order.index(rank)):  # each after the one before it has joined, since it then sees zeros
            while hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"step{step}").item() > size - 1 - step:
                pass
        assert hvd.join() == order[-1]


@on_hvd_workers(2)
def test_a_joined_worker_keeps_what_it_had_submitted(rank: int) -> None:
    handle = hvd.allreduce_async(torch.full((3,), rank + 1.0), name="early", op=hvd.Sum) if rank == 0 else None
    if rank == 1:
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="other").tolist() in ([1.0] * 3,)
        handle = hvd.allreduce_async(torch.full((3,), 2.0), name="early", op=hvd.Sum)
    hvd.join()
    assert hvd.synchronize(handle).tolist() == [3.0] * 3


@on_hvd_workers(2, 3)
def test_what_zeros_cannot_replace_fails_and_join_goes_on(rank: int, size: int) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "Allgather": lambda: hvd.allgather(torch.ones(6)),
        "Broadcast": lambda: hvd.broadcast(torch.ones(6), 1),
        "Alltoall": lambda: hvd.alltoall(torch.ones(6)),
        "Reducescatter": lambda: hvd.reducescatter(torch.ones(6)),
    }
    if rank > 0:
        for kind, call in calls.items():
            with pytest.raises(HorovodInternalError, match=f"{kind} is not supported with Join at this time."):
                call()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="still works").item() == size - 1
    hvd.join()
    for call in calls.values():
        call()


@on_hvd_workers(3)
def test_mismatches_are_found_while_a_worker_has_joined(rank: int) -> None:
    if rank > 0:
        with pytest.raises(HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
            hvd.allreduce(torch.ones(rank), name="uneven")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    hvd.join()


@on_hvd_workers(3)
def test_uneven_epochs_one_after_the_other(rank: int, size: int) -> None:
    """A gradient loop with uneven numbers of batches, a join, and nameless operations: three epochs of it."""
    sums = []
    for epoch in range(3):
        total = 0.0
        for _ in range(1 + (rank + epoch) % size):
            total += hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.join()
        sums.append(hvd.allreduce(torch.tensor(total), op=hvd.Max).item())
        assert hvd.broadcast(torch.tensor(rank), 1).item() == 1
    assert sums == [6.0, 6.0, 6.0]
