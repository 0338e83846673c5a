"""Which rank slows the others down, and in which phase of a step: from each rank's own time, without its waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

from lockstep.diagnosis.explanation import ranks_text
from lockstep.diagnosis.observed_steps import PHASES, ObservedSteps
from lockstep.diagnosis.phases import WAITING, names

SLOWER = 0.2  # by this share slower than the median of the others
NOTICEABLE = 0.05  # and by this share of a step's time; less is not worth a message
WAITED = 0.5  # share of a rank's additional time that the others wait, at least; else no rank is slowed down
REPORTS = 3  # in a row, at least
MIN_STEPS = 100  # in these reports; the first steps of a job differ by chance
DIGITS = 6  # of seconds in records
COMPARE = (
    "it may share its machine with other processes, or run at a lower clock rate: compare load, clock rates and "
    "temperatures with those of the other ranks"
)
OVERSUBSCRIBED = (
    "its machine has more busy threads than cores, which may be the whole cause: use fewer workers, threads or loader "
    "processes there, or wait until other jobs have ended"
)
ADVICE = {
    "data_wait": "compare its storage, its cores and its number of loader processes with those of the other ranks",
    "callbacks": "make its callbacks cheaper, or call them less often",
}


@dataclass(frozen=True)
class Straggler:
    """Ranks of one host that are slower than the others in one phase of a step.

    Args:
        host: Their host; "" if all ranks are on one host.
        seconds: Their own time in this phase per step, on average over the last reports; the largest of these ranks.
        others_seconds: The median of the other ranks.
        oversubscribed: Whether their machine had more busy threads than cores, so that nothing else need be wrong.
    """

    kind: ClassVar[str] = "straggler"  # of its record
    ranks: tuple[int, ...]
    host: str
    phase: str
    seconds: float
    others_seconds: float
    oversubscribed: bool = False

    def describe(self) -> str:
        """Return one line that names the ranks, their host and the phase."""
        several = len(self.ranks) > 1
        where = f" ({self.host})" if self.host else ""
        return (
            f"{ranks_text(self.ranks)}{where} {'slow' if several else 'slows'} all others down: "
            f"{_duration(self.seconds)} per step {names(self.phase).message}, where the median of the others "
            f"is {_duration(self.others_seconds)}"
        )

    @property
    def advice(self) -> str:
        """What to check, in one clause."""
        return ADVICE.get(self.phase, OVERSUBSCRIBED if self.oversubscribed else COMPARE)


@dataclass
class _Streak:
    """Reports in a row in which a rank was slow: its own seconds and those of the others, summed by phase."""

    reports: int = 0
    steps: int = 0
    oversubscribed: int = 0  # of these reports
    own: dict[str, float] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)


class StragglerWatch:
    """Names each rank once, for each phase, that is slow in several reports in a row.

    Args:
        hosts: The host of each rank; not named if there is only one.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts if len(set(hosts)) > 1 else [""] * len(hosts)
        self._streaks: dict[int, _Streak] = {}
        self._named: set[tuple[int, str]] = set()

    def compare(self, workers: Sequence[ObservedSteps], oversubscribed: Sequence[bool]) -> list[Straggler]:
        """Return the ranks to name, given a new report of each rank's observed steps."""
        columns = zip(PHASES, zip(*(each.report_seconds for each in workers), strict=True), strict=True)
        seconds: dict[str, Sequence[float]] = dict(columns)
        waiting = seconds.pop(WAITING)
        step, steps = sum(workers[0].report_seconds), workers[0].report_steps
        return self.update(seconds, step, steps, oversubscribed, waiting)

    def update(
        self,
        seconds: Mapping[str, Sequence[float]],
        step_seconds: float,
        steps: int,
        oversubscribed: Sequence[bool],
        waiting: Sequence[float] | None = None,
    ) -> list[Straggler]:
        """Add a report, and return the ranks to name.

        Args:
            seconds: For each phase, the time per step of every rank, without waiting for other ranks.
            step_seconds: The time of a step, waiting included.
            steps: The number of steps in this report.
            oversubscribed: Whether each rank's machine has more busy threads than cores.
            waiting: The time per step that every rank waits for others; None if they certainly wait for the slowest.
        """
        totals = [sum(each) for each in zip(*seconds.values(), strict=True)]
        others = {phase: medians_of_others(values) for phase, values in seconds.items()}
        found: dict[tuple[str, str], list[tuple[int, _Streak]]] = {}
        waits = medians_of_others(waiting) if waiting else [float("inf")] * len(totals)
        for rank, (total, usual) in enumerate(zip(totals, medians_of_others(totals), strict=True)):
            if not slows_others(total, usual, step_seconds, waits[rank]):
                self._streaks.pop(rank, None)
                continue
            streak = self._streaks.setdefault(rank, _Streak())
            streak.reports += 1
            streak.steps += steps
            streak.oversubscribed += oversubscribed[rank]
            for phase, values in seconds.items():
                streak.own[phase] = streak.own.get(phase, 0.0) + values[rank]
                streak.others[phase] = streak.others.get(phase, 0.0) + others[phase][rank]
            if streak.reports >= REPORTS and streak.steps >= MIN_STEPS:
                del self._streaks[rank]
                phase = max(streak.own, key=lambda phase: streak.own[phase] - streak.others[phase])
                if (rank, phase) not in self._named:
                    self._named.add((rank, phase))
                    found.setdefault((self._hosts[rank], phase), []).append((rank, streak))
        return [_join(host, phase, slow) for (host, phase), slow in found.items()]


def _join(host: str, phase: str, slow: Sequence[tuple[int, _Streak]]) -> Straggler:
    _, worst = max(slow, key=lambda each: each[1].own[phase])
    ranks = tuple(rank for rank, _ in slow)
    own, others = worst.own[phase] / worst.reports, worst.others[phase] / worst.reports
    return Straggler(ranks, host, phase, own, others, oversubscribed=2 * worst.oversubscribed > worst.reports)


def rounded(seconds: Iterable[float]) -> list[float]:
    """Return seconds as records have them."""
    return [round(each, DIGITS) for each in seconds]


def spread_of(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the spread of a phase over the ranks, as `step` records have it."""
    low, middle, high = rounded((min(seconds), median(seconds), max(seconds)))
    return {"min": low, "median": middle, "max": high, "slowest": seconds.index(max(seconds))}


def slows_others(seconds: float, usual: float, step_seconds: float, waits: float) -> bool:
    """Return whether a rank slows the others down, whose own time is `usual`, and who wait so long for it in a step."""
    more = seconds - usual
    return more > 0 and more >= max(SLOWER * usual, NOTICEABLE * step_seconds) and waits >= WAITED * more


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of the other values; for a single value, the value itself."""
    if len(values) < 2:
        return list(values)
    ordered = sorted(values)
    medians = [0.0] * len(values)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    for position, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        medians[index] = (ordered[low + (low >= position)] + ordered[high + (high >= position)]) / 2
    return medians


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{1000 * seconds:{'.3g' if seconds > 0.001 else '.2f'}} ms"
