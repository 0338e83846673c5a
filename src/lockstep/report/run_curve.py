"""Curves over a run, and how long ones are thinned so that a chart stays quick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST_POINTS = 2_000  # of one line: more than a screen has columns
MOST_POINTS_A_CHART = 60_000  # over all its lines
FEWEST_POINTS = 200
THINNED = "Long lines are thinned: each point is the average of a stretch of the run."


@dataclass(frozen=True)
class Curve:
    """One figure over a run; all four have the same length.

    Args:
        steps: Optimizer steps done.
        epochs: Epochs done, fractions included.
        seconds: Of training.
        values: NaN where the figure was no number.
    """

    steps: Sequence[float]
    epochs: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.values)

    def thinned(self, limit: int = MOST_POINTS) -> Curve:
        """At most `limit` points, each the average of a stretch."""
        return Curve(*(averages(column, limit) for column in self._columns())) if len(self) > limit else self

    def changes(self, limit: int = MOST_POINTS) -> Curve:
        """The points at which the value changes, with their neighbours, the first and the last; then as `thinned`."""
        last = len(self) - 1
        changed = [index for index, (one, other) in enumerate(pairwise(self.values)) if one != other]
        kept = sorted({0, last, *changed, *(index + 1 for index in changed)}) if self.values else []
        return Curve(*([column[index] for index in kept] for column in self._columns())).thinned(limit)

    def every(self, limit: int) -> Curve:
        """At most `limit` of the points, evenly chosen."""
        stride = -(-len(self) // limit)
        return Curve(*(column[::stride] for column in self._columns()))

    def _columns(self) -> tuple[Sequence[float], ...]:
        return self.steps, self.epochs, self.seconds, self.values


def averages(column: Sequence[float], limit: int) -> list[float]:
    """The averages of `limit` stretches of about equal length; those of NaN alone are NaN."""
    bounds = [round(index * len(column) / limit) for index in range(limit + 1)]
    return [_average(column[start:end]) for start, end in pairwise(bounds) if end > start]


def points_a_line(lines: int) -> int:
    """How many points each line of a chart may have."""
    return max(FEWEST_POINTS, min(MOST_POINTS, MOST_POINTS_A_CHART // max(lines, 1)))


def drawn(values: Sequence[float], factor: float = 1.0) -> list[float | None]:
    """Values times a factor, rounded to six digits, with None for what is no number."""
    return [float(f"{value * factor:.6g}") if math.isfinite(value) else None for value in values]


def places(values: Sequence[float], divisor: float = 1.0) -> list[float]:
    """Places on the x axis, rounded to eight digits."""
    return [float(f"{value / divisor:.8g}") for value in values]


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """The seconds of a unit that suits the longest time, and the unit's name."""
    if longest_seconds < 300:
        return 1.0, "s"
    return (60.0, "min") if longest_seconds < 3 * 3600 else (3600.0, "h")


def _average(stretch: Sequence[float]) -> float:
    finite = [value for value in stretch if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
