"""How long training waits for data, where the device lags behind the host, on clocks that stand in for both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lockstep.train.monitoring import worker_times
from lockstep.train.monitoring.worker_times import ReportInterval
from lockstep.world import accelerator
from lockstep.world.step_clock import StepClock

LOADER, HOST, STEPS = 0.090, 0.015, 50  # seconds a batch, seconds of the host's work a step


class Clocks:
    """The host's time, and when the device will have done all that was enqueued, in seconds."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def batches(self) -> Iterator[Any]:
        for number in range(STEPS):
            self.host = max(self.host, LOADER * (number + 1))
            yield number

    def take_step(self, seconds: float) -> None:
        self.host += HOST
        self.device = max(self.device, self.host) + seconds

    def record_event(self, event: Event) -> None:
        event.seconds = self.device = max(self.device, self.host)


class Event:
    def __init__(self, clocks: Clocks) -> None:
        self.clocks, self.seconds = clocks, 0.0

    def query(self) -> bool:
        return self.seconds <= self.clocks.host

    def elapsed_time(self, end: Event) -> float:
        assert end.seconds <= self.clocks.host, "the host would wait for the device"
        return 1000 * (end.seconds - self.seconds)


def _waited(clocks: Clocks, seconds_of_step: float) -> float:
    """The share of the time that counts as waiting for data."""
    clock = StepClock(torch.device("cpu"))
    interval = ReportInterval(clock)
    batches = clocks.batches()
    for _ in range(STEPS):
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
def test_waiting_is_measured_on_devices_with_streams(
    seconds_of_step: float, on_host: float, on_device: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks()
    monkeypatch.setattr(worker_times.time, "perf_counter", lambda: clocks.host)
    assert _waited(clocks, seconds_of_step) == pytest.approx(on_host, abs=0.02)
    clocks.__init__()  # type: ignore[misc]
    monkeypatch.setattr(accelerator, "overlaps", lambda device: True)
    monkeypatch.setattr(accelerator, "new_event", lambda device, timing: Event(clocks) if timing else None)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: clocks)
    assert _waited(clocks, seconds_of_step) == pytest.approx(on_device, abs=0.02)
