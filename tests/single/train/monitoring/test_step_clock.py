"""The clock of a step's phases."""

from __future__ import annotations

import time

import pytest
import torch

from lockstep.train.monitoring.step_clock import MOST_MARKS, StepClock
from lockstep.world import accelerator


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list, to be moved by hand."""
    moment = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: moment[0])
    return moment


def test_phases_add_up_to_the_step_and_come_again_within_it(now: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    for phase, seconds in (("forward", 2.0), ("backward", 3.0), ("forward", 4.0), ("optimizer", 5.0)):
        clock.begin(phase)  # type: ignore[arg-type]
        now[0] += seconds
    clock.end()
    assert clock.take() == [{"forward": 6.0, "backward": 3.0, "optimizer": 5.0}]
    assert clock.take() == []


def test_what_lies_between_two_steps_belongs_to_none(now: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    for seconds in (1.0, 2.0):
        clock.begin("data_wait")
        now[0] += seconds
        clock.end()
        now[0] += 50.0
    assert clock.take() == [{"data_wait": 1.0}, {"data_wait": 2.0}]


class Device:
    """A stream whose work takes a second per phase, and which runs behind the host."""

    def __init__(self) -> None:
        self.seconds, self.waits = 0.0, 0

    def record_event(self, event: Event) -> None:
        self.seconds += 1.0
        event.seconds = self.seconds


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.seconds = device, 0.0

    def synchronize(self) -> None:
        self.device.waits += 1

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.seconds - self.seconds)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(accelerator, "overlaps", lambda device: True)
    monkeypatch.setattr(accelerator, "new_event", lambda _, timing: Event(device) if timing else None)
    monkeypatch.setattr(accelerator, "current_stream", lambda _: device)
    return device


def test_events_of_many_steps_are_read_before_the_report_without_waiting_for_recent_ones(device: Device) -> None:
    clock = StepClock(torch.device("cpu"))
    steps = 2 * MOST_MARKS
    for _ in range(steps):
        clock.begin("forward")
        clock.begin("backward")
        clock.end()
        assert len(clock._marks) <= MOST_MARKS
    # Each wait is for an event that many later ones follow.
    assert 0 < device.waits <= 3 * steps / (MOST_MARKS // 2)
    assert clock.take() == [{"forward": 1.0, "backward": 1.0}] * steps
    assert clock.take() == []


def test_the_events_of_a_step_with_many_passes_are_read_after_a_later_step(device: Device) -> None:
    clock = StepClock(torch.device("cpu"))
    for _ in range(10):
        for _ in range(MOST_MARKS):
            clock.begin("forward")
            clock.begin("backward")
        clock.end()
        assert len(clock._marks) <= 4 * MOST_MARKS + 3  # of two steps
    assert clock.take() == [{"forward": float(MOST_MARKS), "backward": float(MOST_MARKS)}] * 10


def test_forgotten_times_do_not_count(device: Device) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.begin("data_wait")
    clock.end()
    clock.begin("forward")  # of a step that is repeated after a rewind
    clock.forget()
    clock.begin("optimizer")
    clock.end()
    assert clock.take() == [{"optimizer": 1.0}]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_phases_are_the_devices_time_and_nobody_waits_for_it() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    clock = StepClock(matrix.device)
    for _ in range(2):  # the first one warms up
        start = time.perf_counter()
        clock.begin("forward")
        for _ in range(50):
            matrix = matrix @ matrix / 4096
        clock.begin("optimizer")
        clock.end()
        asked = time.perf_counter() - start
        (step,) = clock.take()
        whole = time.perf_counter() - start
    assert asked < step["forward"] <= whole
    assert step["optimizer"] < 0.1 * step["forward"]
