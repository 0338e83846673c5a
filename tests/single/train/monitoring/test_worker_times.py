"""The times of each worker's phases, in records and for naming slow workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.diagnosis.phases import PHASES
from lockstep.diagnosis.stragglers import REPORTS
from lockstep.train.monitoring.worker_times import Times, WorkerTimes
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World


class Peers(World):
    """Workers whose phases take as long as this one's, times their factor."""

    factors = (1.0, 2.0, 4.0)
    hosts = ("a", "a", "b")

    def gather(self, value: Any) -> list[Any]:
        return list(self.hosts)

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        return torch.stack([factor * row for factor in self.factors])


STEPS = 100


def _times(**phases: float) -> Times:
    return Times(10.0, 0.0, {phase: phases.get(phase, 0.0) for phase in PHASES})


def test_records_hold_ranges_per_step_and_sums_per_epoch() -> None:
    times = WorkerTimes(Peers(RankInfo(size=3), torch.device("cpu")), ("reduction",))
    for _ in range(2):
        times.report(_times(forward=0.2, reduction=0.1), steps=10)
    assert times.spread() == {
        "forward": {"min": 0.02, "median": 0.04, "max": 0.08, "slowest": 2},
        "reduction": {"min": 0.01, "median": 0.02, "max": 0.04, "slowest": 2},
    }
    assert times.take_epoch() == {"forward": [0.4, 0.8, 1.6], "reduction": [0.2, 0.4, 0.8]}
    assert times.take_epoch() == {}


@pytest.mark.parametrize(("phase", "is_named"), [("forward", True), ("optimizer", False), ("reduction", False)])
def test_phases_that_may_wait_for_others_name_no_worker(phase: str, is_named: bool) -> None:
    times = WorkerTimes(Peers(RankInfo(size=3), torch.device("cpu")), ("reduction", "optimizer"))
    named = [times.report(_times(**{phase: 5.0}), steps=STEPS) for _ in range(REPORTS)][-1]
    assert [(straggler.ranks, straggler.host, straggler.phase) for straggler in named] == (
        [((2,), "b", "forward")] if is_named else []
    )


def test_short_reports_are_joined() -> None:
    times = WorkerTimes(Peers(RankInfo(size=3), torch.device("cpu")), ("reduction",))
    short = Times(0.25, 0.0, _times(forward=0.2).phases)
    named = [bool(times.report(short, steps=STEPS)) for _ in range(4 * REPORTS)]
    assert named == [False] * (4 * REPORTS - 1) + [True]


def test_after_a_rewind_workers_are_named_again() -> None:
    times = WorkerTimes(Peers(RankInfo(size=3), torch.device("cpu")), ("reduction",))
    for _ in range(2):
        named = [bool(times.report(_times(forward=5.0), steps=STEPS)) for _ in range(REPORTS + 1)]
        assert named == [False] * (REPORTS - 1) + [True, False]
        times.forget()


def test_a_single_worker_has_sums_and_no_range() -> None:
    times = WorkerTimes(World(RankInfo(), torch.device("cpu")), ("reduction",))
    assert times.report(_times(forward=0.2), steps=10) == []
    assert times.spread() == {}
    assert times.take_epoch() == {"forward": [0.2]}
