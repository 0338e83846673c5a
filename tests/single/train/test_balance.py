"""Shares of a step by the workers' speeds: `lockstep.train.monitoring.balance`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.data.sharding import Sharding
from lockstep.errors import ConfigError
from lockstep.train.monitoring import balance
from lockstep.train.monitoring.balance import Balance, OwnSeconds, balanced, check_measurable

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
    ahead: list[int] = field(default_factory=lambda: [4, 5, 4])

    def gather(self, _: int) -> list[int]:
        return self.ahead


@dataclass
class _Loader:
    sharding: Sharding = field(default_factory=lambda: Sharding(3000, 30, 0, 3))
    next_step: int = 4
    cuts: list[tuple[tuple[float, ...], int]] = field(default_factory=list)

    def recut(self, fractions: tuple[float, ...], first_step: int) -> None:
        self.cuts.append((fractions, first_step))


def _update(shares: Balance, speeds: list[float], step: int, fixed: float = 0.0, step_in_epoch: int = 3) -> bool:
    """Report steps in which each worker computes its share at its speed, in thousandths of the samples."""
    pairs = zip(shares.fractions, speeds, strict=True)
    own = [OwnSeconds(STEPS * part / speed, STEPS * fixed) for part, speed in pairs]
    return shares.update(own, STEPS, step, step_in_epoch)


@pytest.mark.parametrize("fixed", [0.0, 0.2])
def test_one_cut_equalizes_the_workers(fixed: float) -> None:
    loader = _Loader()
    shares = Balance(_World(), loader)  # type: ignore[arg-type]
    speeds = [1.0, 1.0, 0.5]
    assert not _update(shares, speeds, 10, fixed)  # with the first step
    assert _update(shares, speeds, 20, fixed)
    assert loader.cuts == [(shares.fractions, 5)]  # from the first step that no worker has begun to read
    own = [fixed + part / speed for part, speed in zip(shares.fractions, speeds, strict=True)]
    assert own == pytest.approx([own[0]] * 3)
    assert not _update(shares, speeds, 30, fixed)  # some of its steps had the former shares
    assert not _update(shares, speeds, 40, fixed)
    assert _update(shares, [1.0, 0.5, 1.0], 50, fixed)
    assert shares.fractions[1] == min(shares.fractions)


def test_small_differences_change_no_share() -> None:
    shares = Balance(_World(), _Loader())  # type: ignore[arg-type]
    assert not any(_update(shares, [1.0, 1.02, 0.99], step) for step in range(10, 200, STEPS))


def test_short_times_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "MIN_SECONDS", 25.0)
    shares = Balance(_World(), _Loader())  # type: ignore[arg-type]
    assert [_update(shares, [1.0, 1.0, 0.3], step) for step in (10, 20, 30, 40)] == [False, False, False, True]


def test_a_worker_that_was_not_measured_keeps_the_shares() -> None:
    shares = Balance(_World(), _Loader())  # type: ignore[arg-type]
    for step in (20, 30):
        assert not shares.update([OwnSeconds(1, 0), OwnSeconds(0, 0), OwnSeconds(9, 0)], STEPS, step, step)


def test_only_large_changes_are_worth_a_line() -> None:
    shares = Balance(_World(), _Loader())  # type: ignore[arg-type]
    assert shares.news() == []
    assert _update(shares, [1.0, 1.0, 0.5], 20)
    assert shares.news() == [
        "balance: of the 30 samples of a step, the workers (by rank) now take 12, 12, 6",
    ]
    assert shares.news() == []


@pytest.mark.parametrize(("layer", "refused"), [(nn.SyncBatchNorm(3), True), (nn.BatchNorm1d(3), False)])
def test_waits_in_the_passes_of_a_gpu_are_refused(
    layer: nn.Module, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance.accelerator, "overlaps", lambda device: device.type == "cuda")
    models: list[Any] = [nn.Sequential(layer)]
    check_measurable(models, torch.device("cpu"), "--balance")
    if refused:
        with pytest.raises(ConfigError, match=r"--balance: with synchronized batch norm"):
            check_measurable(models, torch.device("cuda"), "--balance")
    else:
        check_measurable(models, torch.device("cuda"), "--balance")
