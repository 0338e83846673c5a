"""The fitted model of a series: predictions with intervals, errors at each point, and remarks."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lockstep.errors import DataError
from lockstep.scaling_model.least_squares import t_quantile
from lockstep.scaling_model.measured import can_measure, fit_measured
from lockstep.scaling_model.series import MeasuredPoint, Series
from lockstep.scaling_model.shape import Knee, find_knee, listed, remarks_of
from lockstep.scaling_model.times import Parameter, Part, TimeModel, fit_throughput

LEVEL = 0.8  # probability of the intervals; the few points do not support a higher one
WIDEST = 10.0  # wider intervals, as a factor to either side, are not reported


class Prediction(NamedTuple):
    """Predicted throughput on a number of workers.

    Args:
        images_per_second: Throughput in the series' `rate_unit`.
        low, high: Prediction interval of a new measurement at level `LEVEL`, assuming the model holds; or None.
        efficiency: Throughput per worker relative to that at the smallest measured count.
        note: The reason if there is no interval; otherwise "".
    """

    workers: int
    images_per_second: float
    low: float | None
    high: float | None
    efficiency: float
    note: str = ""


class LeftOutPoint(NamedTuple):
    """A measured point and its prediction from the other points; the error is relative to the measured value."""

    workers: int
    measured: float
    predicted: float
    relative_error: float


@dataclass(frozen=True)
class Model:
    """A series and the step times fitted to `points`, which are all or some of its points."""

    series: Series
    points: tuple[MeasuredPoint, ...]
    times: TimeModel
    knee: Knee | None
    per_step: bool

    def predict(self, workers: int) -> Prediction:
        """Predict the throughput on `workers` workers.

        Raises:
            ValueError: `workers` is less than 1.
        """
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        rate = self._rate(workers, self.times.seconds(workers))
        base = self.series.points[0]
        share = rate / workers / (base.images_per_second / base.workers)
        width, note = self._width(workers)
        if width is None:
            return Prediction(workers, rate, None, None, share, note)
        return Prediction(workers, rate, rate / width, rate * width, share, note)

    def _rate(self, workers: int, seconds: float) -> float:
        """Return the throughput if the work of `step_seconds` takes this long."""
        if not self.per_step:
            return (workers if self.series.mode == "weak" else 1) / seconds
        point = self.points[0]
        batch = point.global_batch or 1.0
        return (batch / point.workers * workers if self.series.mode == "weak" else batch) / seconds

    def _width(self, workers: int) -> tuple[float | None, str]:
        """Return the factor by which the interval extends to either side, or None and the reason."""
        batch = self.points[0].global_batch
        if self.series.mode == "strong" and batch and workers > batch:
            return None, f"unreliable: there are more workers than samples in the global batch ({batch:.10g})"
        if self.knee and any(self.knee.separates(point.workers, workers) for point in self.points):
            return None, f"unreliable: a knee at {self.knee.workers} workers lies between this and fitted points"
        parts = self.times.variances(workers)
        if any(variance is None for variance, _ in parts):
            return None, f"no interval: {self.times.no_variance}"
        total = sum(variance or 0.0 for variance, _ in parts)
        if not total:
            return 1.0, ""
        spread = math.sqrt(total) / self.times.seconds(workers) * t_quantile(LEVEL, self._degrees(parts, total))
        if spread > math.log(WIDEST):
            return None, f"no interval: it is wider than a factor of {WIDEST:g} to either side"
        return math.exp(spread), ""

    @staticmethod
    def _degrees(parts: Sequence[Part], total: float) -> float:
        """Return the degrees of freedom of a sum of variances (Welch-Satterthwaite)."""
        return total**2 / sum((variance or 0.0) ** 2 / degrees for variance, degrees in parts)

    @property
    def parameters(self) -> list[Parameter]:
        return self.times.parameters()

    @property
    def degrees_of_freedom(self) -> int:
        """The smallest degrees of freedom of the model's parts."""
        return min(part.degrees for part in self.times.variances(self.points[-1].workers))

    @cached_property
    def leave_one_out(self) -> list[LeftOutPoint]:
        """Each fitted point predicted from the others; the first and the last point are extrapolated."""
        if len(self.points) < 3:
            return []
        errors = []
        for point in self.points:
            others = tuple(other for other in self.points if other is not point)
            predicted = _fit(self.series, others).predict(point.workers).images_per_second
            errors.append(_error(point, predicted))
        return errors

    @property
    def errors(self) -> list[LeftOutPoint]:
        """The model's error at all points of the series, including those that were not fitted."""
        return [_error(point, self.predict(point.workers).images_per_second) for point in self.series.points]

    @property
    def remarks(self) -> list[str]:
        """Caveats for the reader, one or two sentences each."""
        remarks = [*remarks_of(self.series.points, self.knee), *self.times.remarks()]
        if any(point.split for point in self.points) and not can_measure(self.points):
            remarks.append("some points lack a time split of their steps, so the fit uses only throughput")
        if len(self.points) < len(self.series.points):
            counts = listed(str(point.workers) for point in self.points)
            remarks.append(f"fitted only to {counts} workers; the other points are for checking")
        return remarks


def fit(series: Series, only: Collection[int] = ()) -> Model:
    """Fit the model to a series.

    Args:
        only: Fit only to these numbers of workers; to all of them if empty.

    Raises:
        DataError: There are fewer than two numbers of workers, or `only` has one that was not measured.
    """
    measured = [point.workers for point in series.points]
    missing = sorted(set(only) - set(measured))
    if missing:
        raise DataError(
            f"{series.label}: no measurements with {listed(map(str, missing))} workers; measured numbers of workers: "
            f"{listed(map(str, measured))}"
        )
    points = tuple(point for point in series.points if not only or point.workers in only)
    if len(points) < 2:
        named = f"only {listed(str(point.workers) for point in points)}" if points else "none"
        raise DataError(
            f"{series.label}: a fit needs at least two numbers of workers, got {named}; measure more with "
            "`lockstep study scaling --np`"
        )
    return _fit(series, points)


def _fit(series: Series, points: tuple[MeasuredPoint, ...]) -> Model:
    knee = find_knee(series.points)
    if can_measure(points):
        return Model(series, points, fit_measured(points, series.mode), knee, per_step=True)
    per_step = all(point.global_batch for point in points)
    noun = re.sub(r"(ch|sh|ss|x)es$|s$", r"\1", series.rate_unit.removesuffix("/s"))
    unit = "s per step" if per_step else f"s per {noun}" + (" and worker" if series.mode == "weak" else "")
    times = fit_throughput(points, series.mode, per_step, unit)
    return Model(series, points, times, knee, per_step)


def _error(point: MeasuredPoint, predicted: float) -> LeftOutPoint:
    measured = point.images_per_second
    return LeftOutPoint(point.workers, measured, predicted, predicted / measured - 1)
