"""The workers in a run's records: the time of each in the phases of a step, and stragglers.

docs/reference/run-folder.md describes the records, which are in metrics.jsonl.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.diagnosis.phases import RECORDED
from lockstep.diagnosis.stragglers import Straggler
from lockstep.files.jsonl import Record, count, counts, mapping, number, numbers, one_line, plausible, texts
from lockstep.files.metric_records import RECENT, MetricRecords, Position, Split
from lockstep.observe.link_comparison import SlowLink

MAX_RANKS = 1_024  # of a straggler, which has the ranks of one host
MAX_STRAGGLERS = MAX_LINKS = 100  # per run
MAX_INTERVALS = 100  # the newest


def phase_medians(record: Record) -> dict[str, float]:
    """Return the median of the workers' seconds in each known phase of a `step` record; invalid ones are omitted."""
    medians: dict[str, float] = {}
    spreads = mapping(record, "phase_spread")
    for phase in RECORDED:
        if not isinstance(spread := spreads.get(phase), Mapping):
            continue
        low, middle, high = (plausible(spread.get(part)) for part in ("min", "median", "max"))
        if low is not None and middle is not None and high is not None and 0 <= low <= middle <= high:
            medians[phase] = middle
    return medians


def phase_seconds(record: Record, workers: int) -> dict[str, list[float]]:
    """Return the seconds of each known phase of an `epoch` record, by rank; invalid phases are omitted."""
    phases = mapping(record, "phase_seconds")
    found = {phase: numbers(phases, phase, workers) for phase in RECORDED}
    return {phase: seconds for phase, seconds in found.items() if seconds and min(seconds) >= 0}


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


def read_slow_link(record: Record) -> SlowLink | None:
    """Return a `slow_link` record, or None if a field is missing or invalid."""
    ends, evidence, rate = texts(record, "ends"), one_line(record.get("evidence")), number(record, "rate")
    if not 1 <= len(ends) <= 2 or not evidence or rate is None or not 0 <= rate <= 1:
        return None
    return SlowLink(tuple(map(one_line, ends)), evidence, rate)


class RunRecords(MetricRecords):
    """The records of a run, with those of its workers.

    Each worker's time in each phase is that of the last sessions with the same number of workers.
    """

    def __init__(self, limit: int | None = None):
        super().__init__(limit)
        self.stragglers: deque[StragglerRecord] = deque(maxlen=MAX_STRAGGLERS)
        self.straggler: StragglerRecord | None = None  # the newest of the last session
        self.slow_links: deque[SlowLink] = deque(maxlen=MAX_LINKS)  # of the last session
        self.gpu_use: deque[float] = deque(maxlen=MAX_INTERVALS)  # in the last records
        self.recent_phases: deque[dict[str, float]] = deque(maxlen=RECENT)  # medians of the last session's last steps
        self.by_rank: dict[str, list[float]] = {}  # a program's seconds per step in each phase, in the last record
        self.intervals: deque[dict[str, list[float]]] = deque(maxlen=MAX_INTERVALS)  # the same, in the last records
        self.program_facts: Record = {}  # facts about the program
        self._count = 0  # workers
        self._epoch_start = self.timed_steps = 0.0  # the latter in `worker_phases`
        self._sums: dict[str, list[float]] = {}  # seconds of each phase, by rank

    def take(self, record: Record) -> None:
        super().take(record)
        if record.get("kind") == "program":
            self.program_facts = record
        if record.get("kind") == "straggler":
            self.pass_time(record)
            if straggler := read_straggler(record):
                self.straggler = straggler
                self.stragglers.append(straggler)
        if record.get("kind") == "slow_link" and (link := read_slow_link(record)):
            self.slow_links.append(link)

    def begin_session(self, record: Record) -> None:
        super().begin_session(record)
        self.straggler, self.program_facts = None, {}
        for each in (self.slow_links, self.gpu_use, self.recent_phases, self.intervals):
            each.clear()
        workers, step = count(record, "workers") or 0, count(record, "step")
        if workers != self._count:
            self._count, self.timed_steps, self._sums = workers, 0.0, {}
        self._epoch_start = self._epoch_start if step is None else step

    def take_step(self, position: Position, record: Record) -> None:
        super().take_step(position, record)
        if phases := phase_medians(record):
            self.recent_phases.append(phases)
        self.by_rank = phase_seconds(record, self._count) if "program" in self.start else {}
        if self.by_rank:
            self.intervals.append(self.by_rank)
        if (use := number(record, "gpu_use")) is not None and 0 <= use <= 1:
            self.gpu_use.append(use)

    def take_epoch(self, split: Split, position: Position, record: Record) -> None:
        super().take_epoch(split, position, record)
        if split == "val":
            return
        steps, seconds = position[0] - self._epoch_start, phase_seconds(record, self._count)
        if seconds and steps > 0:
            self.timed_steps += steps
            for phase, values in seconds.items():
                sums = self._sums.get(phase, [0.0] * self._count)
                self._sums[phase] = [before + value for before, value in zip(sums, values, strict=True)]
        self._epoch_start = position[0]

    def worker_phases(self) -> dict[str, list[float]]:
        """Return the seconds per step of each rank, for each phase that was recorded."""
        return {phase: [value / self.timed_steps for value in sums] for phase, sums in self._sums.items()}
