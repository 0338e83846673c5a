"""Who is named, from step times that the tests choose."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.diagnosis.stragglers import COMPARE
from lockstep.hvd.monitoring.step_times import BACKWARD, BEFORE_BACKWARD, OPTIMIZER, STEP, STEPS, StepTimes
from lockstep.hvd.monitoring.straggler_report import StragglerReport
from lockstep.hvd.monitoring.timeline import Timeline

HOSTS = ["alpha", "beta", "gamma"]


class GivenTimes(StepTimes):
    """Step times that were not measured."""

    def __init__(self, loading: float) -> None:
        super().__init__()
        self.loading: float | None = loading

    def take(self, at_least: int) -> dict[str, float] | None:
        if self.loading is None:
            return None
        return {BEFORE_BACKWARD: self.loading, BACKWARD: 0.02, OPTIMIZER: 0.001, STEP: 0.1, STEPS: 50}


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
