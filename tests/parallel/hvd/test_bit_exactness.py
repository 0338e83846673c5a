"""With three workers, where the order of a sum shows in its last bits: runs give the same bits however timing falls."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from gradients import bits, gradient, grads, new_parameters
from worker_group import run_in_workers

from lockstep import hvd
from lockstep.world.world import World

# Buckets that fit a control message alone but not together, and some that never do.
SHAPES = [(200,), (220,), (20, 11), (3000,), (180,), (2500,), (7,)]


def _train(world: World, arguments: dict[str, Any], in_order: bool) -> str:
    """Give the parameters their gradients in a certain order or in any, all at once or with pauses."""
    hvd.init()
    parameters = new_parameters(SHAPES, torch.float32)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **arguments)
    chance = random.Random(hvd.rank())
    history = []
    for step in range(15):
        optimizer.zero_grad()
        order = list(range(len(SHAPES)))
        if not in_order:
            chance.shuffle(order)
        for index in order:
            (parameters[index] * gradient(parameters[index], index, hvd.rank(), step)).sum().backward()
            if not in_order:
                time.sleep(chance.choice([0, 0, 0.0005, 0.003]))
        optimizer.synchronize()
        history.append(bits(grads(parameters)))
        with optimizer.skip_synchronize():
            optimizer.step()
    hvd.shutdown()
    return "".join(history)


@pytest.mark.parametrize("arguments", [{}, {"groups": 99}, {"groups": 4}, {"compression": hvd.Compression.fp16}])
def test_the_order_in_which_gradients_come_about_changes_no_bit(arguments: dict[str, Any]) -> None:
    runs = [run_in_workers(3, _train, arguments, in_order) for in_order in (True, False, False)]
    assert len({history for run in runs for history in run}) == 1
