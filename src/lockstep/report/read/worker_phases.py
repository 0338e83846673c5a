"""Each worker's time per step in each phase, from the sums in a run's `epoch` records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.files.fields import count
from lockstep.files.phase_records import phase_seconds


class WorkerPhases:
    """Adds up the epochs of a run; after a resume on a different number of workers, only the later epochs count."""

    def __init__(self) -> None:
        self._workers = 0
        self._step = 0.0  # at the end of the last epoch, or where the session started
        self._steps = 0.0  # in the sums
        self._sums: dict[str, list[float]] = {}

    def begin_session(self, record: Mapping[str, Any]) -> None:
        """Take the `run` record of a session."""
        workers = count(record, "workers") or 0
        if workers != self._workers:
            self._workers, self._steps, self._sums = workers, 0.0, {}
        step = count(record, "step")
        self._step = self._step if step is None else step

    def add_epoch(self, step: float, record: Mapping[str, Any]) -> None:
        """Add the `epoch` record of training that ended at `step`."""
        seconds = phase_seconds(record, self._workers)
        if seconds and step > self._step:
            self._steps += step - self._step
            for phase, values in seconds.items():
                sums = self._sums.setdefault(phase, [0.0] * self._workers)
                self._sums[phase] = [before + value for before, value in zip(sums, values, strict=True)]
        self._step = step

    def per_step(self) -> dict[str, list[float]]:
        """Return the seconds per step of each rank, for each phase that was recorded."""
        return {phase: [value / self._steps for value in sums] for phase, sums in self._sums.items()}
