"""Who is named, from step times that the tests choose."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.diagnosis.phases import BEFORE_BACKWARD, WAITING, Phases
from lockstep.diagnosis.stragglers import COMPARE
from lockstep.hvd.monitoring.straggler_report import STEP, STEPS, StragglerReport, summarize
from lockstep.hvd.monitoring.timeline import Timeline
from lockstep.world.step_clock import StepClock

HOSTS = ["alpha", "beta", "gamma"]


class GivenTimes(StepClock):
    """Step times that were not measured."""

    def __init__(self, loading: float) -> None:
        super().__init__()
        self.loading: float | None = loading

    def take_ready(self, at_least: int) -> Sequence[Phases]:
        if self.loading is None:
            return []
        return 50 * [{BEFORE_BACKWARD: self.loading, "backward": 0.02, "optimizer": 0.001, WAITING: 0.1}]


class Job:
    """The reports of three workers, which share a store."""

    def __init__(self, *loading: float) -> None:
        self.store = dist.HashStore()
        self.timeline = Timeline()
        self.times = [GivenTimes(seconds) for seconds in loading]
        self.reports = [
            StragglerReport(rank, HOSTS, 10.0, times, self.timeline) for rank, times in enumerate(self.times)
        ]

    def check(self, times: int) -> None:
        for _ in range(times):
            for report in reversed(self.reports):  # rank 0 compares at the end
                report.check(self.store)


def test_the_slow_rank_is_named_once_after_three_reports(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    job = Job(0.01, 0.05, 0.01)
    job.timeline.open(str(tmp_path / "trace.json"))
    job.check(2)
    assert not caplog.records
    job.check(20)
    job.timeline.close()
    assert caplog.record_tuples == [
        (
            "lockstep.hvd",
            logging.WARNING,
            "rank 1 (beta) slows all others down: 50 ms per step before the backward pass (loading, forward), "
            f"where the median of the others is 10 ms; {COMPARE}",
        )
    ]
    [event] = [each for each in json.loads((tmp_path / "trace.json").read_text()) if each["name"] == "STRAGGLER"]
    assert (event["ph"], event["s"]) == ("i", "g")
    assert (event["args"]["ranks"], event["args"]["host"], event["args"]["phase"]) == ([1], "beta", BEFORE_BACKWARD)


def test_similar_ranks_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    Job(0.010, 0.012, 0.011).check(20)
    assert not caplog.records


def test_ranks_are_compared_only_when_each_has_a_new_report(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(0.01, 0.05, 0.01)
    job.check(2)
    job.times[2].loading = None  # it takes no steps
    job.check(20)
    assert not caplog.records
    job.times[2].loading = 0.01
    job.check(1)
    assert len(caplog.records) == 1


def test_rare_long_steps_do_not_count_and_frequent_ones_do() -> None:
    """A checkpoint every 20 steps, or a loader whose 4 processes are all late every 4 steps."""

    def mean(long: float, interval: int) -> float:
        steps: list[Phases] = [{BEFORE_BACKWARD: 1.0 if number % interval else long} for number in range(100)]
        return summarize(steps)[BEFORE_BACKWARD]

    assert mean(1000.0, 20) == 1.0
    assert 15 < mean(81.0, 4) < 21


def test_steps_are_summarized_with_their_waiting() -> None:
    steps: list[Phases] = [{BEFORE_BACKWARD: 1.0, WAITING: 4.0, "backward": 2.0}] * 3
    assert summarize(steps) == {BEFORE_BACKWARD: 1.0, "backward": 2.0, "optimizer": 0.0, STEP: 7.0, STEPS: 3}
