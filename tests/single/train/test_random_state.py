"""The random state of a user's own loop: what depends on the worker."""

from __future__ import annotations

import random

import torch

from lockstep.train.own_loop.random_state import RandomState


def _drawn(state: RandomState) -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), state.agreed.random()


def test_draws_before_the_steps_are_equal_on_all_workers() -> None:
    draws = []
    for _ in range(2):
        state = RandomState()
        state.begin_epoch(5, 3)
        draws.append(_drawn(state))
    assert draws[0] == draws[1]


def test_agreed_draws_of_a_step_are_equal_on_all_workers() -> None:
    draws = []
    for rank in range(3):
        state = RandomState()
        state.begin_step(5, 3, 7, rank, agrees=True)
        draws.append(_drawn(state))
    numbers = [set(each) for each in zip(*draws, strict=True)]
    assert [len(each) for each in numbers] == [3, 3, 1]


def test_seeds_epochs_and_steps_have_draws_of_their_own() -> None:
    state, draws = RandomState(), list[tuple[float, float, float]]()
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        state.begin_epoch(seed, epoch)
        draws.append(_drawn(state))
        for step in range(3):
            state.begin_step(seed, epoch, step, 0, agrees=True)
            draws.append(_drawn(state))
    assert [len(set(each)) for each in zip(*draws, strict=True)] == [12] * 3
