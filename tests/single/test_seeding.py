"""A step's random numbers are a function of (seed, step, rank)."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from lockstep.seeding import AHEAD, seed_all, seed_step


def _draw(*numbers: int, seed: Callable[..., None] = seed_all) -> tuple[float, float, float]:
    seed(*numbers)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_same_step_draws_the_same_and_any_other_does_not() -> None:
    places = [(0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0), (2**40, 10**7, 4095)]
    draws = [_draw(*place) for place in places]
    assert draws == [_draw(*place) for place in places]
    for library in zip(*draws, strict=True):
        assert len(set(library)) == len(places)


def test_steps_hashed_together_draw_as_those_hashed_alone() -> None:
    for step in (1, AHEAD - 1, AHEAD, 5 * AHEAD, 2**32 - 1, 2**32):
        for numbers in ((7, step, 0), (7, step, 1), (7, 3, step, 1)):
            assert _draw(*numbers, seed=seed_step) == _draw(*numbers)
