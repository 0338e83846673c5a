"""hvd's reports of stragglers, and its watch of the store."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from lockstep.diagnosis.observed_steps import PHASES, ObservedSteps
from lockstep.diagnosis.phases import WAITING
from lockstep.diagnosis.stragglers import COMPARE
from lockstep.hvd.engine.stall_watch import StoreWatch, StragglerReport
from lockstep.hvd.engine.timeline import Timeline

TIMEOUT_SECONDS = 30


class Counted:
    """A check that counts its runs, and raises an error in one of them."""

    def __init__(self, interval_seconds: float, fails_at: int = 0) -> None:
        self.interval_seconds = interval_seconds
        self.runs = 0
        self.third = threading.Event()
        self._fails_at = fails_at

    def check(self, store: Any) -> None:
        self.runs += 1
        store.set("key", "value")
        if self.runs == self._fails_at:
            raise RuntimeError("the store is closed")
        if self.runs == 3:
            self.third.set()


def _store() -> Any:
    return dist.PrefixStore("job", dist.TCPStore("127.0.0.1", 0, is_master=True))


def test_each_check_has_its_own_interval_until_close() -> None:
    often, rarely = Counted(0.01), Counted(3600.0)
    watch = StoreWatch(_store(), [often, rarely])
    assert often.third.wait(TIMEOUT_SECONDS)
    watch.close()
    watch._thread.join(TIMEOUT_SECONDS)
    assert not watch._thread.is_alive()
    assert rarely.runs == 0


def test_the_thread_ends_when_the_store_is_closed() -> None:
    check = Counted(0.01, fails_at=2)
    watch = StoreWatch(_store(), [check])
    watch._thread.join(TIMEOUT_SECONDS)
    assert not watch._thread.is_alive()
    assert check.runs == 2
    watch.close()


def test_disabled_checks_start_no_thread() -> None:
    watch = StoreWatch(dist.HashStore(), [])
    assert not watch._thread.is_alive()
    watch.close()


HOSTS = ["alpha", "beta", "gamma"]


class Given:
    """An observer whose reports are given."""

    def __init__(self, forward: float) -> None:
        self.published = ObservedSteps()
        self.forward: float | None = forward

    def report(self) -> None:
        if self.forward is not None:
            seconds = {"forward": self.forward, "backward": 0.02, "optimizer": 0.001, WAITING: 0.1}
            phases = tuple(seconds.get(phase, 0.0) for phase in PHASES)
            number = self.published.report + 1
            self.published = ObservedSteps(report=number, report_steps=50, report_seconds=phases)


class Job:
    """The reports of three workers, which share a store."""

    def __init__(self, *forward: float) -> None:
        self.store = dist.HashStore()
        self.timeline = Timeline()
        self.observers = [Given(seconds) for seconds in forward]
        self.reports = [
            StragglerReport(rank, HOSTS, 10.0, cast(Any, observer), self.timeline)
            for rank, observer in enumerate(self.observers)
        ]

    def check(self, times: int) -> None:
        for _ in range(times):
            for observer in self.observers:
                observer.report()
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
            "rank 1 (beta) slows all others down: 50 ms per step in the forward pass, "
            f"where the median of the others is 10 ms; {COMPARE}",
        )
    ]
    [event] = [each for each in json.loads((tmp_path / "trace.json").read_text()) if each["name"] == "STRAGGLER"]
    assert (event["ph"], event["s"]) == ("i", "g")
    assert (event["args"]["ranks"], event["args"]["host"], event["args"]["phase"]) == ([1], "beta", "forward")


def test_similar_ranks_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    Job(0.010, 0.012, 0.011).check(20)
    assert not caplog.records


def test_ranks_are_compared_only_when_each_has_a_new_report(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(0.01, 0.05, 0.01)
    job.check(2)
    job.observers[2].forward = None  # it takes no steps
    job.check(20)
    assert not caplog.records
    job.observers[2].forward = 0.01
    job.check(1)
    assert len(caplog.records) == 1
