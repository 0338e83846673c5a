"""A step's random numbers are a function of (seed, step, rank)."""

from __future__ import annotations

import random

import numpy as np
import torch

from lockstep.seeding import seed_all


def _draw(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_all(seed, step, rank)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_same_step_draws_the_same_and_any_other_does_not() -> None:
    places = [(0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0), (2**40, 10**7, 4095)]
    draws = [_draw(*place) for place in places]
    assert draws == [_draw(*place) for place in places]
    for library in zip(*draws, strict=True):
        assert len(set(library)) == len(places)
