"""The time between two reports: training time, including waiting for data, and excluded time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from lockstep.data.batch import Batch
from lockstep.world.device_clock import DeviceClock


class Times(NamedTuple):
    """Seconds of an interval.

    Attributes:
        seconds: Wall time of training, snapshots and checkpoints included.
        wait_seconds: The part of `seconds` spent waiting for data.
        excluded_seconds: Wall time not included in `seconds`, such as an evaluation.
    """

    seconds: float
    wait_seconds: float
    excluded_seconds: float


class ReportInterval:
    """Measures the time from one report to the next, without gaps, even across epochs.

    On a device with streams, only the time in which the device waits for data counts. The host runs ahead of the device
    and may wait for a batch while the device is still busy with the previous step.
    """

    def __init__(self, device: torch.device):
        self._clock = DeviceClock(device)
        self.batch_seconds = 0.0
        """How long the host waited for the last batch."""
        self.restart()

    def restart(self) -> None:
        """Start a new interval now, and discard the measurements since the last report."""
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
        """Exclude the last `seconds` from the training time."""
        self._excluded += seconds

    def end(self) -> Times:
        """End the interval and start the next; on a device with streams, call this when its steps are finished."""
        now, excluded = time.perf_counter(), self._excluded
        waits = sum(self._clock.seconds(start, end) for start, end in self._waits)
        times = Times(now - self._start - excluded, waits, excluded)
        self._begin(now)
        return times
