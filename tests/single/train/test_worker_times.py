"""The times of each worker's phases, in records and for naming slow workers; how long training waits for data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lockstep.diagnosis.phases import PHASES
from lockstep.diagnosis.stragglers import REPORTS
from lockstep.train import worker_times
from lockstep.train.worker_times import Times, WorkerTimes
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.step_clock import StepClock
from lockstep.world.world import World


class Peers(World):
    """Workers whose phases take as long as this one's, times their factor."""

    factors = (1.0, 2.0, 4.0)
    hosts = ("a", "a", "b")

    def gather(self, value: Any) -> list[Any]:
        return list(self.hosts)

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        return torch.stack([factor * row for factor in self.factors])


STEPS, CPU = 100, torch.device("cpu")


def _times(**phases: float) -> Times:
    return Times(10.0, {phase: phases.get(phase, 0.0) for phase in PHASES})


def test_records_hold_ranges_per_step_and_sums_per_epoch() -> None:
    times = WorkerTimes(Peers(RankInfo(size=3), CPU), StepClock(CPU), ("reduction",))
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
    times = WorkerTimes(Peers(RankInfo(size=3), CPU), StepClock(CPU), ("reduction", "optimizer"))
    named = [times.report(_times(**{phase: 5.0}), steps=STEPS) for _ in range(REPORTS)][-1]
    assert [(straggler.ranks, straggler.host, straggler.phase) for straggler in named] == (
        [((2,), "b", "forward")] if is_named else []
    )


class Ring(Peers):
    """Three hosts, of which the second sends slowly to the third."""

    hosts = ("a", "b", "c")

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        rows = row.repeat(3, 1)
        for rank, busy in enumerate((0.05, 0.9, 0.05)):
            link = torch.tensor([rank, (rank + 1) % 3, 1e7, busy, 0, 100])
            rows[rank, len(PHASES) + 1 : len(PHASES) + 7] = link
        return rows


def test_a_slow_link_is_named() -> None:
    times = WorkerTimes(Ring(RankInfo(size=3), CPU), StepClock(CPU), ("reduction",))
    named = [each for _ in range(2 * REPORTS) for each in times.report(_times(forward=5.0), steps=STEPS)]
    assert [each.name for each in named] == ["link b -> c"]


def test_short_reports_are_joined() -> None:
    times = WorkerTimes(Peers(RankInfo(size=3), CPU), StepClock(CPU), ("reduction",))
    short = Times(0.25, _times(forward=0.2).phases)
    named = [bool(times.report(short, steps=STEPS)) for _ in range(4 * REPORTS)]
    assert named == [False] * (4 * REPORTS - 1) + [True]


def test_a_single_worker_is_not_compared_but_measured() -> None:
    times = WorkerTimes(World(RankInfo(), CPU), StepClock(CPU), ("reduction",))
    assert times.report(_times(forward=0.2), steps=10) == []
    assert times.spread() == {"forward": {"min": 0.02, "median": 0.02, "max": 0.02, "slowest": 0}}
    assert times.take_epoch() == {"forward": [0.2]}


LOADER, HOST, BATCHES = 0.090, 0.015, 50  # seconds a batch, seconds of the host's work a step


class Clocks:
    """The host's time, and when the device will have done all that was enqueued, in seconds."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def batches(self) -> Iterator[Any]:
        for number in range(BATCHES):
            self.host = max(self.host, LOADER * (number + 1))
            yield number

    def take_step(self, seconds: float) -> None:
        self.host += HOST
        self.device = max(self.device, self.host) + seconds

    def timestamp(self) -> Event:
        self.device = max(self.device, self.host)
        return Event(self, self.device)


class Event:
    """Has no `synchronize`: a clock that waits for the device fails."""

    def __init__(self, clocks: Clocks, seconds: float) -> None:
        self.clocks, self.seconds = clocks, seconds

    def query(self) -> bool:
        return self.seconds <= self.clocks.host

    def elapsed_time(self, end: Event) -> float:
        assert end.seconds <= self.clocks.host, "read before the device has reached it"
        return 1000 * (end.seconds - self.seconds)


def _wait_share(clocks: Clocks, seconds_of_step: float) -> float:
    clock = StepClock(CPU)
    interval = WorkerTimes(World(RankInfo(), CPU), clock, ())
    batches = clocks.batches()
    for _ in range(BATCHES):
        clock.begin("data_wait")
        next(batches)
        clock.begin("forward")
        clocks.take_step(seconds_of_step)
        clock.end()
    clocks.host = max(clocks.host, clocks.device)  # the report waits for the steps
    times = interval.end()
    return times.wait_seconds / times.seconds


@pytest.mark.parametrize(
    ("seconds_of_step", "on_host", "on_device"),
    [
        (0.088, 0.82, 0.02),  # the loader is a little slower than the device, which hardly waits
        (0.045, 0.83, 0.34),  # a third of the time the device has no batch
        (0.200, 0.38, 0.01),  # only the first batch is waited for
    ],
)
def test_waiting_for_data_is_timed_on_devices_with_streams(
    seconds_of_step: float,
    on_host: float,
    on_device: float,
    monkeypatch: pytest.MonkeyPatch,
    accelerators: Callable[..., None],
) -> None:
    clocks = Clocks()
    monkeypatch.setattr(worker_times.time, "perf_counter", lambda: clocks.host)
    assert _wait_share(clocks, seconds_of_step) == pytest.approx(on_host, abs=0.02)
    clocks.__init__()  # type: ignore[misc]
    accelerators(overlaps=True, timestamp=lambda device: clocks.timestamp())
    assert _wait_share(clocks, seconds_of_step) == pytest.approx(on_device, abs=0.02)
