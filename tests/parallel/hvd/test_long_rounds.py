"""Rounds whose messages are longer than one exchange, and differ in order, shape and who has joined."""

from __future__ import annotations

import pytest
import torch
from worker_group import run_in_workers

from lockstep import hvd
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.world.world import World

SIZE = 3
NAMES = 200  # whose entries are longer than the 2 KiB of one exchange


def test_workers_agree_on_messages_of_any_length() -> None:
    def work(world: World) -> int:
        hvd.init()
        rank = hvd.rank()

        def reduced(names: range, count: int) -> None:
            handles = {
                number: hvd.allreduce_async(torch.full((count,), float(number)), name=f"t{number}", op=hvd.Sum)
                for number in names
            }
            for number, handle in handles.items():
                assert hvd.synchronize(handle).tolist() == [SIZE * number] * count

        for count in (1, 600):  # inside the message, and outside
            reduced(range(1), count)
            for names in (3, NAMES):
                reduced(range(names), count)
                reduced(range(names) if rank else range(names)[::-1], count)
        with pytest.raises(HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
            hvd.allreduce(torch.ones(1 + rank), name="other")
        if rank < SIZE - 1:
            assert hvd.allreduce(torch.ones(5), op=hvd.Sum, name="last").tolist() == [SIZE - 1.0] * 5
        last = hvd.join()
        hvd.shutdown()
        return last

    assert run_in_workers(SIZE, work)[0] in range(SIZE - 1)
