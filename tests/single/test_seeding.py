"""A step's random numbers are a function of (seed, step, rank)."""

from __future__ import annotations

import random

import numpy as np
import torch

from lockstep.seeding import BLOCK, seed_all, seed_step, seed_torch


def _draw(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_all(seed, step, rank)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_same_step_draws_the_same_and_any_other_does_not() -> None:
    places = [(0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0), (2**40, 10**7, 4095)]
    draws = [_draw(*place) for place in places]
    assert draws == [_draw(*place) for place in places]
    for library in zip(*draws, strict=True):
        assert len(set(library)) == len(places)


def test_steps_in_a_row_and_out_of_order_are_seeded_alike() -> None:
    for step in (0, 1, BLOCK - 1, BLOCK, 5 * BLOCK + 3, BLOCK + 1):
        seed_step(7, step, 2)
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        assert drawn == _draw(7, step, 2)


def test_lockstep_network_needs_no_seeds_of_python_and_numpy() -> None:
    _, _, drawn = _draw(7, 5, 2)
    random.seed(1)
    np.random.seed(1)
    seed_torch(7, 5, 2, torch.device("cpu"))
    assert float(torch.rand(())) == drawn
    others = random.random(), float(np.random.rand())
    random.seed(1)
    np.random.seed(1)
    assert (random.random(), float(np.random.rand())) == others
