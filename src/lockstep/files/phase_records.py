"""The workers' time in each phase of a step, as recorded in metrics.jsonl (docs/reference/run-folder.md)."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.files.fields import Record, count, counts, mapping, number, numbers, one_line

OWN_PHASES = ("data_wait", "callbacks", "forward", "backward", "metrics", "optimizer")  # in the order of a step
WAITING = "reduction"  # for other workers; some flags make workers wait in other phases, too
MOST_RANKS = 1_024  # in a straggler record, which has the ranks of one host


@dataclass(frozen=True)
class PhaseSpread:
    """Seconds per step in one phase: the smallest, the median and the largest of the workers."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class StragglerRecord:
    """A `straggler` record; for the fields see `lockstep.diagnosis.stragglers.Straggler`.

    Args:
        step: Optimizer steps done when it was recorded.
    """

    step: int
    ranks: tuple[int, ...]
    host: str
    phase: str
    seconds: float
    others_seconds: float


def phase_spreads(record: Record) -> dict[str, PhaseSpread]:
    """Return the spread of each known phase of a `step` record; invalid ones are omitted."""
    spreads = {}
    for phase in (*OWN_PHASES, WAITING):
        low, median, high = (number(record, "phase_spread", phase, part) for part in ("min", "median", "max"))
        if low is not None and median is not None and high is not None and 0 <= low <= median <= high:
            spreads[phase] = PhaseSpread(low, median, high)
    return spreads


def phase_seconds(record: Record, workers: int) -> dict[str, list[float]]:
    """Return the seconds of each known phase of an `epoch` record, by rank; invalid phases are omitted."""
    phases = mapping(record, "phase_seconds")
    found = {phase: numbers(phases, phase, workers) for phase in (*OWN_PHASES, WAITING)}
    return {phase: seconds for phase, seconds in found.items() if seconds and min(seconds) >= 0}


def read_straggler(record: Record) -> StragglerRecord | None:
    """Return a `straggler` record, or None if a field is missing or invalid; `host` may be missing."""
    ranks, step, phase = counts(record, "ranks", MOST_RANKS), count(record, "step"), one_line(record.get("phase"))
    seconds, others = number(record, "seconds"), number(record, "others_seconds")
    if not ranks or step is None or not phase or seconds is None or others is None or min(seconds, others) < 0:
        return None
    return StragglerRecord(step, tuple(sorted(set(ranks))), one_line(record.get("host")), phase, seconds, others)
