"""The time between two reports: how much of it was training, waiting for data, or is not counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from lockstep.data.batch import Batch
from lockstep.train.monitoring.device_clock import DeviceClock


class Times(NamedTuple):
    """Seconds of an interval.

    Attributes:
        seconds: Wall time of training, snapshots and checkpoints included.
        wait_seconds: The part of it spent waiting for data.
        excluded_seconds: Wall time of the interval that `seconds` leaves out, such as an evaluation.
    """

    seconds: float
    wait_seconds: float
    excluded_seconds: float


class ReportInterval:
    """Measures from one report to the next without a gap, over the ends of epochs too.

    On a device with streams, waiting for data is the time in which the device waited: the host is ahead of it, and may
    wait for a batch long before the device has done the step before.
    """

    def __init__(self, device: torch.device):
        self._clock = DeviceClock(device)
        self.batch_seconds = 0.0
        """How long the host waited for the newest batch."""
        self.restart()

    def restart(self) -> None:
        """Begin an interval now, and forget what was measured since the last report."""
        self._begin(time.perf_counter())

    def _begin(self, start: float) -> None:
        self._start = start
        self._waits: list[tuple[Any, Any]] = []
        self._excluded = 0.0

    def next_of(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch; the time until it arrives counts as waiting."""
        start, mark = time.perf_counter(), self._clock.now()
        batch = next(batches)
        self.batch_seconds = time.perf_counter() - start
        self._waits.append((mark, self._clock.now()))
        return batch

    def exclude(self, seconds: float) -> None:
        """Leave seconds that have just passed out of the training time."""
        self._excluded += seconds

    def end(self) -> Times:
        """End the interval and begin the next one; on a device with streams, call this when its steps are done."""
        now, excluded = time.perf_counter(), self._excluded
        waits = sum(self._clock.seconds(start, end) for start, end in self._waits)
        times = Times(now - self._start - excluded, waits, excluded)
        self._begin(now)
        return times
