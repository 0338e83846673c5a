"""The few collectives of World, in real processes."""

from __future__ import annotations

import pytest
import torch
from processes import run_in_workers

from lockstep.world import World


def _exchange(world: World) -> tuple[list[object], object, list[float]]:
    gathered = world.gather({"rank": world.rank, "text": "ü" * world.rank})
    told = world.from_main([1, "two", None] if world.is_main else "not this")
    return gathered, told, world.sum_(torch.tensor([1.0, world.rank], dtype=torch.float64)).tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_worker_gets_the_same_answers(size: int) -> None:
    expected = (
        [{"rank": rank, "text": "ü" * rank} for rank in range(size)],
        [1, "two", None],
        [float(size), float(sum(range(size)))],
    )
    assert run_in_workers(size, _exchange) == [expected] * size
