"""The workers in a run's records: the time of each in the phases of a step, and stragglers.

docs/reference/run-folder.md describes the records, which are in metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.diagnosis.phases import RECORDED
from lockstep.diagnosis.stragglers import Straggler
from lockstep.files.jsonl import Record, count, counts, mapping, number, numbers, one_line

MAX_RANKS = 1_024  # of a straggler, which has the ranks of one host


def phase_medians(record: Record) -> dict[str, float]:
    """Return the median of the workers' seconds in each known phase of a `step` record; invalid ones are omitted."""
    medians: dict[str, float] = {}
    for phase in RECORDED:
        low, middle, high = (number(record, "phase_spread", phase, part) for part in ("min", "median", "max"))
        if low is not None and middle is not None and high is not None and 0 <= low <= middle <= high:
            medians[phase] = middle
    return medians


def phase_seconds(record: Record, workers: int) -> dict[str, list[float]]:
    """Return the seconds of each known phase of an `epoch` record, by rank; invalid phases are omitted."""
    phases = mapping(record, "phase_seconds")
    found = {phase: numbers(phases, phase, workers) for phase in RECORDED}
    return {phase: seconds for phase, seconds in found.items() if seconds and min(seconds) >= 0}


class WorkerPhases:
    """Each worker's time in each phase, from the sums in a run's `epoch` records.

    After a resume on a different number of workers, only the later epochs count.
    """

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


@dataclass(frozen=True)
class StragglerRecord(Straggler):
    """A `straggler` record.

    Args:
        step: Optimizer steps done when it was recorded.
    """

    step: int = 0


def read_straggler(record: Record) -> StragglerRecord | None:
    """Return a `straggler` record, or None if a field is missing or invalid; `host` may be missing."""
    ranks, step, phase = counts(record, "ranks", MAX_RANKS), count(record, "step"), one_line(record.get("phase"))
    seconds, others = number(record, "seconds"), number(record, "others_seconds")
    if not ranks or step is None or not phase or seconds is None or others is None or min(seconds, others) < 0:
        return None
    host = one_line(record.get("host"))
    return StragglerRecord(tuple(sorted(set(ranks))), host, phase, seconds, others, step=step)
