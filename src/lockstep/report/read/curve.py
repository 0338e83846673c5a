"""Curves over a run; long ones are thinned to keep charts fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MAX_POINTS = 2_000  # per line: more than the pixel columns of most screens
MAX_POINTS_A_CHART = 20_000  # over all its lines; a browser draws as many in half a second
FEWEST_POINTS = 200
THINNED = "Long lines are thinned: each point is the average of an interval of the run."


@dataclass(frozen=True)
class Curve:
    """One metric over a run; all four sequences have the same length.

    Args:
        steps: Optimizer steps done.
        epochs: Epochs done, with fractions.
        seconds: Training time.
        values: The metric; NaN if it was missing or not finite.
    """

    steps: Sequence[float]
    epochs: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.values)

    def thinned(self, limit: int = MAX_POINTS) -> Curve:
        """Reduce the curve to at most `limit` points, each the average of an interval."""
        return Curve(*(averages(column, limit) for column in self._columns())) if len(self) > limit else self

    def changes(self, limit: int = MAX_POINTS) -> Curve:
        """Keep the first and last points and the points before and after each change of value; then apply `thinned`."""
        finite = [index for index, value in enumerate(self.values) if math.isfinite(value)]
        kept = set(finite[:1] + finite[-1:])
        for before, index in pairwise(finite):
            if self.values[before] != self.values[index]:
                kept |= {before, index}
        return Curve(*([column[index] for index in sorted(kept)] for column in self._columns())).thinned(limit)

    def every(self, limit: int) -> Curve:
        """Keep at most `limit` evenly spaced points."""
        stride = -(-len(self) // limit)
        return Curve(*(column[::stride] for column in self._columns()))

    def _columns(self) -> tuple[Sequence[float], ...]:
        return self.steps, self.epochs, self.seconds, self.values


def averages(column: Sequence[float], limit: int) -> list[float]:
    """Average at most `limit` intervals of about equal length; an interval without finite values gives NaN."""
    values = np.asarray(column, dtype=np.float64)
    starts = np.arange(min(limit, len(values))) * len(values) // min(limit, len(values))
    known = np.isfinite(values)
    sums, counts = np.add.reduceat(np.where(known, values, 0.0), starts), np.add.reduceat(known.astype(int), starts)
    return [float(total / count) if count else math.nan for total, count in zip(sums, counts, strict=True)]


def points_a_line(lines: int) -> int:
    """Return the maximum number of points per line in a chart of `lines` lines."""
    return max(FEWEST_POINTS, min(MAX_POINTS, MAX_POINTS_A_CHART // max(lines, 1)))


def drawn(values: Sequence[float], factor: float = 1.0) -> list[float | None]:
    """Scale values by `factor` and round them to six digits; non-finite values become None."""
    return [float(f"{value * factor:.6g}") if math.isfinite(value) else None for value in values]


def x_values(values: Sequence[float], divisor: float = 1.0) -> list[float]:
    """Divide x values by `divisor` and round them to eight digits."""
    return [float(f"{value / divisor:.8g}") for value in values]


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """Return a unit that suits the longest time: its length in seconds and its name."""
    if longest_seconds < 300:
        return 1.0, "s"
    return (60.0, "min") if longest_seconds < 3 * 3600 else (3600.0, "h")
