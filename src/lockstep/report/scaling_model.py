"""The scaling model: t(n) = a + c·(n - 1)/n + d·log2(n), fitted to a series of measured points.

t is the time in which n workers process one image each (weak scaling) or one image together (strong scaling, with a/n
instead of a). 2·(n - 1)/n times the gradients is what each worker of a ring sends; log2(n) is the rounds of a tree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import NormalDist, stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import DataError
from lockstep.report.scaling_series import MeasuredPoint, Mode, Series

LEVEL = 0.8  # probability of the intervals
MIN_COUNTS = 3  # different numbers of workers, as the model has three terms
MIN_SPREAD = 0.02  # relative standard deviation of a point at least, since few repeats may agree by chance
TERMS = ("compute", "bandwidth", "latency")  # a, c and d
MAX_WIDTH = 10.0  # wider intervals, as a factor to either side, are not reported

Floats = NDArray[np.float64]


class Prediction(NamedTuple):
    """Predicted throughput on a number of workers.

    Args:
        images_per_second: Throughput in the series' `rate_unit`.
        low, high: Interval of a new measurement with probability `LEVEL`, assuming the model holds; or None.
        efficiency: Throughput per worker relative to that at the smallest measured count.
        note: The reason if there is no interval; otherwise "".
    """

    workers: int
    images_per_second: float
    low: float | None
    high: float | None
    efficiency: float
    note: str = ""


@dataclass(frozen=True)
class Model:
    """A series and the terms fitted to `points`, which are all or some of its points.

    Args:
        terms: The values of `TERMS`, in `unit`.
        root: Root of the terms' covariance (root @ root.T). It and `noise` are scaled up if the points deviate from the
            model by more than their spread.
        noise: Relative standard deviation of a new measurement.
    """

    series: Series
    points: tuple[MeasuredPoint, ...]
    terms: Floats
    root: Floats
    noise: float

    def predict(self, workers: int) -> Prediction:
        row = _row(self.series.mode, workers)
        seconds = float(row @ self.terms)
        rate = (workers if self.series.mode == "weak" else 1) / seconds
        efficiency = rate / workers / self.series.base_rate
        deviation = math.hypot(float(np.linalg.norm(row @ self.root)) / seconds, self.noise)
        spread = deviation * NormalDist().inv_cdf((1 + LEVEL) / 2)
        batch = self.series.points[0].global_batch
        if self.series.mode == "strong" and batch and workers > batch:
            note = f"unreliable: there are more workers than samples in the global batch ({batch:.10g})"
        elif spread > math.log(MAX_WIDTH):
            note = f"no interval: it is wider than a factor of {MAX_WIDTH:g} to either side"
        else:
            return Prediction(workers, rate, rate / math.exp(spread), rate * math.exp(spread), efficiency)
        return Prediction(workers, rate, None, None, efficiency, note)

    @property
    def unit(self) -> str:
        """The unit of the terms."""
        noun = re.sub(r"(ch|sh|ss|x)es$|s$", r"\1", self.series.rate_unit.removesuffix("/s"))
        return f"s per {noun}" + (" and worker" if self.series.mode == "weak" else "")

    @property
    def largest_error(self) -> float:
        """The largest relative error at a point of the series, including those that were not fitted."""
        points = self.series.points
        return max(abs(self.predict(point.workers).images_per_second / point.images_per_second - 1) for point in points)

    @property
    def remarks(self) -> list[str]:
        """Caveats for the reader, one or two sentences each."""
        remarks = []
        if shared := [point.workers for point in self.series.points if point.oversubscribed]:
            remarks.append(
                f"more workers than cores with {listed(shared)} workers: the model counts waiting for cores as a cost "
                "of scaling, so its predictions do not apply to machines with a core per worker"
            )
        if len(self.points) < len(self.series.points):
            counts = listed(point.workers for point in self.points)
            remarks.append(f"fitted only to {counts} workers; the other points are for checking")
        return remarks


def fit(series: Series, only: Collection[int] = ()) -> Model:
    """Fit the model to a series.

    Args:
        only: Fit only to these numbers of workers; to all of them if empty.

    Raises:
        DataError: There are fewer than three numbers of workers, or `only` has one that was not measured.
    """
    measured = [point.workers for point in series.points]
    if missing := sorted(set(only) - set(measured)):
        raise DataError(
            f"{series.label}: no measurements with {listed(missing)} workers; measured numbers of workers: "
            f"{listed(measured)}"
        )
    points = tuple(point for point in series.points if not only or point.workers in only)
    if len(points) < MIN_COUNTS:
        raise DataError(
            f"{series.label}, {series.mode} scaling: a fit needs at least {MIN_COUNTS} numbers of workers, got only "
            f"{listed(point.workers for point in points)}; measure more with `lockstep study scaling --np`"
        )
    spreads = np.array([_spread(point) for point in points])
    seconds = np.array([(p.workers if series.mode == "weak" else 1) / p.images_per_second for p in points])
    rows = np.array([_row(series.mode, point.workers) for point in points])
    weighted = rows / (spreads * seconds)[:, None]
    terms, squares = nonnegative_least_squares(weighted, 1 / spreads)
    misfit = math.sqrt(max(1.0, squares / max(1, len(points) - MIN_COUNTS)))
    noise = math.sqrt(float(np.mean(spreads**2)))
    return Model(series, points, terms, misfit * np.linalg.pinv(weighted), misfit * noise)


def _row(mode: Mode, workers: int) -> Floats:
    return np.array([1 / workers if mode == "strong" else 1.0, (workers - 1) / workers, math.log2(workers)])


def _spread(point: MeasuredPoint) -> float:
    """Return the relative standard deviation of the repeats, or the assumed one if that is larger."""
    return max(MIN_SPREAD, stdev(point.rates) / point.images_per_second if len(point.rates) > 1 else 0.0)


def nonnegative_least_squares(design: Floats, target: Floats) -> tuple[Floats, float]:
    """Return nonnegative coefficients, of which the first is positive, and the sum of squared residuals.

    Tries every subset of the three columns that includes the first one.
    """
    best, least = np.zeros(3), math.inf
    for chosen in ([0], [0, 1], [0, 2], [0, 1, 2]):
        found = np.linalg.lstsq(design[:, chosen], target, rcond=None)[0]
        squares = float(np.sum((design[:, chosen] @ found - target) ** 2))
        if found[0] > 0 and (found >= 0).all() and squares < least:
            best, least = np.zeros(3), squares
            best[chosen] = found
    return best, least


def listed(names: Iterable[object]) -> str:
    """Join names with commas and "and"."""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last
