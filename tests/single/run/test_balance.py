"""Shares of a step by the workers' speeds: `lockstep.run.balance`."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.data.sharding import Sharding
from lockstep.errors import ConfigError
from lockstep.models.global_batch_norm import GlobalBatchNorm
from lockstep.run.balance import MIN_SECONDS, SURE_SECONDS, Balance, OwnSeconds, balanced, check_measurable
from lockstep.run.data_parallel import GroupPeers
from lockstep.train.worker_times import TimedPeers, build_clock

STEPS = 10
SPEEDS = st.lists(st.floats(0.1, 10), min_size=1, max_size=8)


@settings(derandomize=True)
@given(slopes=SPEEDS, data=st.data())
def test_no_other_shares_finish_a_step_earlier(slopes: list[float], data: st.DataObject) -> None:
    size = len(slopes)
    fixed = data.draw(st.lists(st.floats(0, 1), min_size=size, max_size=size))
    smallest = 0.125 / size
    found = balanced(slopes, fixed, smallest)
    assert sum(found) == pytest.approx(1)
    assert min(found) >= smallest * 0.999
    assert max(found) <= max(1.0, 2 / size) * 1.001
    seconds = [own + slope * part for own, slope, part in zip(fixed, slopes, found, strict=True)]
    for rank, each in enumerate(seconds):  # the slowest cannot give anything: others are as slow, or have the most
        for other, theirs in enumerate(seconds):
            if found[rank] > smallest * 1.001 and found[other] < min(1.0, 2 / size) * 0.999 and size > 1:
                assert each <= theirs * 1.001 + 1e-6


@dataclass
class _World:
    """Three workers, of which this is the first."""

    size: int = 3
    is_main: bool = True
    ahead: list[int] = field(default_factory=lambda: [4, 5, 4])

    def gather(self, _: int) -> list[int]:
        return self.ahead

    def from_main(self, value: Any) -> Any:
        return value


@dataclass
class _Loader:
    sharding: Sharding = field(default_factory=lambda: Sharding(3000, 30, 0, 3))
    next_step: int = 4
    prefetches: bool = False
    cuts: list[tuple[tuple[float, ...], int]] = field(default_factory=list)

    def recut(self, fractions: tuple[float, ...], first_step: int) -> None:
        self.cuts.append((fractions, first_step))
        self.sharding = replace(self.sharding, fractions=fractions)


def _balance(samples: int = 3000, batch: int = 600, size: int = 3, prefetches: bool = False) -> Balance:
    loader = _Loader(Sharding(samples, batch, 0, size), prefetches=prefetches)
    return Balance(_World(size), loader, step=0)  # type: ignore[arg-type]


def _update(
    shares: Balance, speeds: list[float], step: int, fixed: float = 0.0, loading: float = 0.0, seconds: float = STEPS
) -> bool:
    """Report steps in which each worker computes its share of a step's whole work, `seconds` in all, at its speed."""
    whole = sum(shares.counts)
    pairs = zip(shares.counts, speeds, strict=True)
    own = [OwnSeconds(seconds * count / whole / speed, STEPS * fixed, STEPS * loading) for count, speed in pairs]
    return shares.update(own, STEPS, step, step_in_epoch=3)


@pytest.mark.parametrize("fixed", [0.0, 0.2])
def test_one_cut_equalizes_the_workers(fixed: float) -> None:
    shares, speeds = _balance(), [1.0, 1.0, 0.5]
    assert not _update(shares, speeds, 10, fixed)  # with the first step
    assert _update(shares, speeds, 20, fixed)
    own = [fixed + count / 600 / speed for count, speed in zip(shares.counts, speeds, strict=True)]
    assert own == pytest.approx([own[0]] * 3, rel=0.02)
    assert not _update(shares, speeds, 30, fixed)  # some of its steps had the former shares
    assert not _update(shares, speeds, 40, fixed)
    assert _update(shares, [1.0, 0.5, 1.0], 50, fixed)
    assert shares.counts[1] == min(shares.counts)


def test_new_shares_start_where_no_worker_reads_yet() -> None:
    loader = _Loader()
    assert _update(Balance(_World(), loader, step=0), [1.0, 1.0, 0.5], 20)  # type: ignore[arg-type]
    assert [first for _, first in loader.cuts] == [5]


def test_the_first_step_of_a_session_is_not_measured() -> None:
    shares = Balance(_World(), _Loader(), step=40)  # type: ignore[arg-type]
    assert not _update(shares, [1.0, 1.0, 0.2], 50)
    assert _update(shares, [1.0, 1.0, 0.2], 60)


def test_a_second_run_goes_on_with_the_shares_of_the_loader() -> None:
    loader = _Loader()
    assert _update(Balance(_World(), loader, step=0), [1.0, 1.0, 0.5], 20)  # type: ignore[arg-type]
    again = Balance(_World(), loader, step=0)  # type: ignore[arg-type]
    assert again.counts == loader.sharding.counts()
    assert not any(_update(again, [1.0, 1.0, 0.5], step) for step in (20, 30, 40))


def test_small_differences_change_no_share() -> None:
    shares = _balance()
    assert not any(_update(shares, [1.0, 1.02, 0.99], step) for step in range(10, 200, STEPS))


def test_speeds_that_vary_around_a_mean_change_no_share() -> None:
    shares, varying = _balance(), [[1.0, 1.1, 0.9], [1.0, 0.9, 1.1]]
    seconds = 3 * SURE_SECONDS / 3.5  # of each worker a third, so that four updates are enough to be sure
    updates = (_update(shares, varying[step // STEPS % 2], step, seconds=seconds) for step in range(10, 200, STEPS))
    assert not any(updates)


@pytest.mark.parametrize(
    ("batch", "speeds"),
    [(3, [1.0, 1.0]), (5, [1.0, 1.0]), (10, [1.0, 1.0, 1.0]), (32, [*[1.0] * 7, 0.6]), (16, [1.0, 0.8])],
)
def test_shares_of_few_samples_settle(batch: int, speeds: list[float]) -> None:
    shares = _balance(10 * batch, batch, len(speeds))
    shares._world.ahead = [4] * len(speeds)  # type: ignore[attr-defined]
    longest = [max(count / speed for count, speed in zip(shares.counts, speeds, strict=True))]
    for step in range(20, 400, STEPS):
        _update(shares, speeds, step)
        longest.append(max(count / speed for count, speed in zip(shares.counts, speeds, strict=True)))
    assert longest == sorted(longest, reverse=True)
    assert len(set(longest)) <= 3


@pytest.mark.parametrize(("loading", "changes"), [(0.0, True), (0.5, False)])
def test_waiting_for_loader_processes_tells_no_speed(loading: float, changes: bool) -> None:
    shares = _balance(prefetches=True)
    assert any(_update(shares, [1.0, 1.0, 0.5], step, loading=loading) for step in range(20, 60, STEPS)) == changes


def test_short_times_are_added_up() -> None:
    shares, seconds = _balance(), 3 * 0.3 * MIN_SECONDS / 2.5  # of which the slowest worker needs two and a half
    updates = [_update(shares, [1.0, 1.0, 0.3], step, seconds=seconds) for step in (20, 30, 40)]
    assert updates == [False, False, True]


def test_a_worker_that_is_not_measured_is_reported_once() -> None:
    shares, lines = _balance(), list[str]()
    for step in range(20, 200, STEPS):
        assert not shares.update([OwnSeconds(1, 0), OwnSeconds(0, 0), OwnSeconds(9, 0)], STEPS, step, step)
        lines += shares.news()
    assert len(lines) == 1
    assert "cannot be measured" in lines[0]


def test_only_large_changes_are_worth_a_line() -> None:
    shares = _balance()
    assert shares.news() == []
    assert _update(shares, [1.0, 1.0, 0.5], 20)
    assert shares.news() == ["balance: of the 600 samples of a step, the workers (by rank) now take 240, 240, 120"]
    assert shares.news() == []


def test_a_model_with_timed_batch_norms_can_be_copied_and_saved() -> None:
    norm = GlobalBatchNorm(3)
    norm.peers = GroupPeers()
    model = nn.Sequential(norm)
    build_clock(torch.device("cpu"), model)
    assert isinstance(norm.peers, TimedPeers)
    for copied in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied[0].peers, GroupPeers)


@pytest.mark.parametrize(("layer", "refused"), [(nn.SyncBatchNorm(3), True), (nn.BatchNorm1d(3), False)])
def test_waits_in_the_passes_of_a_gpu_are_refused(layer: nn.Module, refused: bool) -> None:
    models: list[Any] = [nn.Sequential(layer)]
    check_measurable(models, torch.device("cpu"), "--balance")
    if refused:
        with pytest.raises(ConfigError, match=r"--balance: with synchronized batch norm"):
            check_measurable(models, torch.device("cuda"), "--balance")
    else:
        check_measurable(models, torch.device("cuda"), "--balance")
