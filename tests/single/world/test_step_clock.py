"""The clock of a step's phases on a CPU; tests/parallel/simgpu/test_step_clock.py has it on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.diagnosis.phases import BEFORE_BACKWARD, WAITING
from lockstep.world.step_clock import MAX_MARKS, MAX_STEP_MARKS, MAX_STEPS, DeviceClock, StepClock


class MovedClock(DeviceClock):
    """A clock of a device that reaches timestamps up to `reached`."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.time = 0.0
        self.reached = float("inf")
        self.capturing = False

    def now(self) -> float:
        return self.time

    def wait_for(self, timestamp: Any) -> None:
        self.reached = max(self.reached, timestamp)

    @property
    def has_time(self) -> bool:
        return not self.capturing

    def is_reached(self, timestamp: Any) -> bool:
        return bool(timestamp <= self.reached)


def test_phases_add_up_to_the_step_and_may_repeat() -> None:
    clock, times = MovedClock(), StepClock()
    times.clock = clock
    for phase, seconds in (("forward", 2.0), ("backward", 3.0), ("forward", 4.0), ("optimizer", 5.0)):
        times.begin(phase)  # type: ignore[arg-type]
        clock.time += seconds
    times.end()
    clock.time += 50.0  # between two steps, which is not counted
    times.begin("data_wait")
    clock.time += 1.0
    times.end()
    assert times.take() == [{"forward": 6.0, "backward": 3.0, "optimizer": 5.0}, {"data_wait": 1.0}]
    assert times.take() == []


class Script:
    """Steps of given durations, without time between them."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        self.times = StepClock(first=BEFORE_BACKWARD)
        self.times.clock = self.clock
        self.step()  # not measured

    def wait(self, seconds: float) -> None:
        self.times.pause()
        self.clock.time += seconds
        self.times.resume()

    def step(self, loading: float = 1.0, backward: float = 2.0, reduction: float = 4.0, optimizer: float = 8.0) -> None:
        self.clock.time += loading
        self.times.begin("backward")
        self.clock.time += backward
        self.times.begin(WAITING)
        self.wait(reduction)
        self.times.begin("optimizer")
        self.clock.time += optimizer
        self.times.end()


STEP = {BEFORE_BACKWARD: 1.0, "backward": 2.0, WAITING: 4.0, "optimizer": 8.0}


@pytest.fixture
def script() -> Script:
    return Script()


def test_steps_of_a_script_follow_each_other_and_are_taken_once(script: Script) -> None:
    for _ in range(3):
        script.step()
    assert script.times.take_ready() == [STEP] * 3
    assert not script.times.take_ready()


def test_waits_between_steps_count_as_waiting(script: Script) -> None:
    for _ in range(2):
        script.clock.time += 0.25
        script.wait(100.0)
        script.wait(100.0)
        script.step()
    assert script.times.take_ready() == [STEP | {BEFORE_BACKWARD: 1.25, WAITING: 204.0}] * 2


def test_waiting_ends_when_no_thread_waits(script: Script) -> None:
    script.times.pause()
    script.wait(100.0)  # while the other one waits
    script.step(loading=3.0, backward=5.0)
    script.clock.time += 9.0
    script.times.resume()
    script.clock.time += 7.0
    script.step()
    assert script.times.take_ready() == [
        {BEFORE_BACKWARD: 0.0, WAITING: 120.0},
        {WAITING: 13.0, BEFORE_BACKWARD: 8.0, "backward": 2.0, "optimizer": 8.0},
    ]


def test_steps_are_read_when_the_device_has_reached_them(script: Script) -> None:
    script.clock.reached = script.clock.time + 20
    for _ in range(3):
        script.step()
    assert script.times.take_ready() == [STEP]
    script.clock.reached = float("inf")
    script.step()
    assert script.times.take_ready() == [STEP] * 3


def test_memory_is_bounded(script: Script) -> None:
    script.clock.reached = 0.0
    for _ in range(MAX_MARKS):
        script.step()
        assert sum(map(len, script.times._unread)) <= MAX_MARKS
    script.clock.reached = float("inf")
    for _ in range(2 * MAX_STEPS):
        script.step()
    assert script.times.take_ready()
    assert not script.times.take_ready()
    for _ in range(2 * MAX_STEP_MARKS):
        script.wait(1.0)
    assert len(script.times._marks) <= MAX_STEP_MARKS + 1


def test_a_step_that_is_captured_into_a_graph_is_not_measured(script: Script) -> None:
    script.clock.capturing = True
    script.step()
    script.clock.capturing = False
    script.step()  # the start of the next one
    assert not script.times.take_ready()
    script.step()
    script.step()
    assert script.times.take_ready() == [STEP] * 2


def test_nothing_is_kept_for_reductions_without_an_optimizer() -> None:
    """As in Lockstep's own training loop, which measures its steps itself."""
    times = StepClock(first=BEFORE_BACKWARD)
    times.clock = MovedClock()
    for phase in ("backward", WAITING, "optimizer", "backward"):
        times.begin(phase)  # type: ignore[arg-type]
    assert not times._marks


def test_nothing_is_measured_without_a_clock(script: Script) -> None:
    script.times.clock = None
    script.step()
    script.step()
    assert not script.times.take_ready()
