"""The phases of a training step: their names in code, messages, reports and `lockstep watch`, and their records.

docs/reference/run-folder.md describes the records, which are in metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from lockstep.files.jsonl import Record, count, mapping, number, numbers

StepPhase = Literal["data_wait", "callbacks", "forward", "backward", "metrics", "optimizer", "reduction"]
Phase = Literal["starting", StepPhase, "before_backward", "evaluation", "checkpoint", "running"]
Phases = Mapping[Phase, float]  # seconds
PHASES: tuple[StepPhase, ...] = get_args(StepPhase)  # of the trainer's steps, in their order
WAITING: StepPhase = "reduction"  # for other workers; some flags make workers wait in other phases, too
OWN_PHASES = tuple(phase for phase in PHASES if phase != WAITING)
BEFORE_BACKWARD: Phase = "before_backward"  # from the end of a step to the last backward pass's first gradient
RECORDED: tuple[Phase, ...] = (*PHASES, BEFORE_BACKWARD)  # the trainer's, and those of other programs


class PhaseNames(NamedTuple):
    """What users read: in messages (after "5 ms per step"), in reports, and in `lockstep watch`."""

    message: str
    report: str
    watch: str


NAMES: dict[str, PhaseNames] = {
    "data_wait": PhaseNames("waiting for data", "waiting for data", "data"),
    "callbacks": PhaseNames("in callbacks", "callbacks", "callbacks"),
    "forward": PhaseNames("in the forward pass", "forward", "forward"),
    "backward": PhaseNames("in the backward pass", "backward", "backward"),
    "metrics": PhaseNames("counting correct predictions", "metrics", "metrics"),
    "optimizer": PhaseNames("in the optimizer's step", "optimizer", "optimizer"),
    "before_backward": PhaseNames(
        "in other work, such as logging (without a DataLoader also loading and forward)", "other work", "other"
    ),
    WAITING: PhaseNames("waiting for other workers", "waiting for other workers", "waiting"),
}


def names(phase: str) -> PhaseNames:
    """Return what users read for a phase; the phase itself if it is unknown."""
    return NAMES.get(phase, PhaseNames(phase, phase, phase))


class PhaseSpread(NamedTuple):
    """Seconds per step in one phase: the smallest, the median and the largest of the workers."""

    low: float
    median: float
    high: float


def phase_spreads(record: Record) -> dict[str, PhaseSpread]:
    """Return the spread of each known phase of a `step` record; invalid ones are omitted."""
    spreads: dict[str, PhaseSpread] = {}
    for phase in RECORDED:
        low, middle, high = (number(record, "phase_spread", phase, part) for part in ("min", "median", "max"))
        if low is not None and middle is not None and high is not None and 0 <= low <= middle <= high:
            spreads[phase] = PhaseSpread(low, middle, high)
    return spreads


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
