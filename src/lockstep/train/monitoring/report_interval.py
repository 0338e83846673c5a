"""The time between two reports: training time, the phases of its steps, and excluded time."""

from __future__ import annotations

import time
from typing import NamedTuple

from lockstep.diagnosis.phases import PHASES, Phases
from lockstep.world.step_clock import StepClock


class Times(NamedTuple):
    """Seconds of an interval.

    Attributes:
        seconds: Wall time of training, snapshots and checkpoints included.
        excluded_seconds: Wall time not included in `seconds`, such as an evaluation.
        phases: The parts of `seconds` by phase of the steps; on a device with streams, as seen by the device, since the
            host runs ahead of it.
    """

    seconds: float
    excluded_seconds: float
    phases: Phases

    @property
    def wait_seconds(self) -> float:
        """The part of `seconds` spent waiting for data."""
        return self.phases.get("data_wait", 0.0)


class ReportInterval:
    """Measures the time from one report to the next, without gaps, even across epochs."""

    def __init__(self, clock: StepClock):
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Start a new interval now, and discard the measurements since the last report."""
        self._clock.forget()
        self._start, self._excluded = time.perf_counter(), 0.0

    def exclude(self, seconds: float) -> None:
        """Exclude the last `seconds` from the training time."""
        self._excluded += seconds

    def end(self) -> Times:
        """End the interval and start the next; waits for the device."""
        steps = self._clock.take()
        phases: Phases = {phase: sum(step.get(phase, 0.0) for step in steps) for phase in PHASES}
        now, excluded = time.perf_counter(), self._excluded
        times = Times(now - self._start - excluded, excluded, phases)
        self._start, self._excluded = now, 0.0
        return times
