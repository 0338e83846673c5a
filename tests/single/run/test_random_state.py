"""The random state of a user's own loop: what depends on the worker, and which stream a loader gets."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from lockstep.data.exact_loader import ExactLoader
from lockstep.run.connect import TrainingWorld
from lockstep.run.random_state import RandomState
from lockstep.world.launcher_environment import RankInfo


def _drawn(state: RandomState) -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), state.agreed.random()


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


def _order(loader: ExactLoader) -> list[int]:
    loader.begin(0)
    return [number for batch in loader for number in batch.tolist()]


def _orders_in_a_run(folder: Path, made_before: int) -> list[list[int]]:
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    loaders = [world.loader(list(range(40)), 4, shuffle=True) for _ in range(made_before + 3)]
    *others, second, train, later = loaders
    run = world.run(folder, loader=train, second=second)
    orders = [_order(each) for each in (train, second, later, *others)]
    run.close()
    return orders


@pytest.mark.parametrize("made_before", [1, 2])
def test_loaders_of_a_run_have_the_streams_of_their_names(made_before: int, tmp_path: Path) -> None:
    orders = _orders_in_a_run(tmp_path / "some", made_before)
    assert orders[:2] == _orders_in_a_run(tmp_path / "none", 0)[:2]
    assert orders[0] == _order(TrainingWorld(RankInfo(), torch.device("cpu")).loader(list(range(40)), 4, shuffle=True))
    assert len(set(map(tuple, orders))) == made_before + 3
