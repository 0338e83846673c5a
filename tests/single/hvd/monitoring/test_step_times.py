"""A worker's own time in each phase, with a clock that the tests move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.hvd.monitoring.step_times import (
    BACKWARD,
    BEFORE_BACKWARD,
    MAX_SPANS,
    MAX_STEPS,
    MAX_UNREAD,
    OPTIMIZER,
    REDUCTION,
    STEP,
    STEPS,
    StepTimes,
)
from lockstep.world.device_clock import DeviceClock


class MovedClock(DeviceClock):
    """A clock of a device that reaches timestamps up to `reached`."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.time = 0.0
        self.reached = float("inf")
        self.capturing = False

    def now(self) -> float:
        return self.time

    @property
    def has_time(self) -> bool:
        return not self.capturing

    def is_reached(self, mark: Any) -> bool:
        return bool(mark <= self.reached)


class Training:
    """Steps of given durations."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        self.times = StepTimes()
        self.times.clock = self.clock
        self.step()  # not measured

    def wait(self, seconds: float) -> None:
        self.times.pause()
        self.clock.time += seconds
        self.times.resume()

    def step(self, loading: float = 1.0, backward: float = 2.0, reduction: float = 4.0, optimizer: float = 8.0) -> None:
        self.clock.time += loading
        self.times.enter(BACKWARD)
        self.clock.time += backward
        self.times.enter(REDUCTION)
        self.wait(reduction)
        self.times.enter(OPTIMIZER)
        self.clock.time += optimizer
        self.times.end_step()


@pytest.fixture
def training() -> Training:
    return Training()


def test_phases_exclude_the_reduction_that_the_step_includes(training: Training) -> None:
    for _ in range(3):
        training.step()
    assert training.times.take(3) == {BEFORE_BACKWARD: 1.0, BACKWARD: 2.0, OPTIMIZER: 8.0, STEP: 15.0, STEPS: 3}


def test_there_is_no_report_of_too_few_steps_and_each_step_is_in_one(training: Training) -> None:
    training.step()
    assert training.times.take(2) is None
    training.step()
    assert training.times.take(2) is not None
    training.step()
    assert training.times.take(2) is None


def test_waits_between_steps_do_not_count(training: Training) -> None:
    for _ in range(2):
        training.clock.time += 0.25
        training.wait(100.0)
        training.wait(100.0)
        training.step()
    assert training.times.take(2) == {BEFORE_BACKWARD: 1.25, BACKWARD: 2.0, OPTIMIZER: 8.0, STEP: 215.25, STEPS: 2}


def test_the_wait_of_another_thread_stops_the_time_too_and_never_starts_it(training: Training) -> None:
    for _ in range(2):
        training.times.pause()
        training.wait(100.0)  # while the other one waits
        training.step(loading=3.0, backward=5.0)
        training.times.resume()
        training.clock.time += 7.0
    training.step()
    assert training.times.take(3) == pytest.approx(
        {BEFORE_BACKWARD: 3.5, BACKWARD: 0, OPTIMIZER: 0, STEP: 71.0, STEPS: 3}
    )


def test_a_rare_long_gap_does_not_count_and_a_frequent_one_does(training: Training) -> None:
    """A checkpoint every 20 steps, or a loader whose 4 processes are all late every 4 steps."""
    for number in range(100):
        training.step(loading=1000.0 if number % 20 == 0 else 1.0)
    seconds = training.times.take(100)
    assert seconds
    assert seconds[BEFORE_BACKWARD] == 1.0
    for number in range(100):
        training.step(loading=81.0 if number % 4 == 0 else 1.0)
    seconds = training.times.take(100)
    assert seconds
    assert 15 < seconds[BEFORE_BACKWARD] < 21


def test_steps_are_read_when_the_device_has_reached_them(training: Training) -> None:
    training.clock.reached = training.clock.time + 20
    for _ in range(3):
        training.step()
    assert training.times.take(2) is None
    training.clock.reached = float("inf")
    training.step()
    assert training.times.take(4) == {BEFORE_BACKWARD: 1.0, BACKWARD: 2.0, OPTIMIZER: 8.0, STEP: 15.0, STEPS: 4}


def test_memory_is_bounded(training: Training) -> None:
    training.clock.reached = 0.0
    for _ in range(2 * MAX_UNREAD):
        training.step()
    assert len(training.times._unread) == MAX_UNREAD
    training.clock.reached = float("inf")
    for _ in range(2 * MAX_STEPS):
        training.step()
    assert training.times.take(MAX_STEPS)
    assert training.times.take(1) is None
    for _ in range(2 * MAX_SPANS):
        training.wait(1.0)
    assert len(training.times._spans) == MAX_SPANS


def test_a_step_that_is_captured_into_a_graph_is_not_measured(training: Training) -> None:
    training.clock.capturing = True
    training.step()
    training.clock.capturing = False
    training.step()  # the start of the next one
    assert training.times.take(1) is None
    training.step()
    training.step()
    assert training.times.take(2) == {BEFORE_BACKWARD: 1.0, BACKWARD: 2.0, OPTIMIZER: 8.0, STEP: 15.0, STEPS: 2}


def test_nothing_is_kept_for_reductions_without_an_optimizer() -> None:
    """As in Lockstep's own training loop, which measures its steps itself."""
    times = StepTimes()
    times.clock = MovedClock()
    for phase in (BACKWARD, REDUCTION, OPTIMIZER, BACKWARD):
        times.enter(phase)
    assert not times._spans


def test_nothing_is_measured_without_a_clock(training: Training) -> None:
    training.times.clock = None
    training.step()
    training.step()
    assert training.times.take(1) is None
