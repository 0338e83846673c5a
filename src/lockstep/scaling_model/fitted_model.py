"""The fitted model of a series: predictions with an interval, what each point says of it, and its remarks."""

from __future__ import annotations

import math
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

LEVEL = 0.8  # probability of the intervals; few points support no higher one
WIDEST = 10.0  # an interval of more than this factor to a side says nothing


class Prediction(NamedTuple):
    """Throughput on a number of workers.

    Args:
        images_per_second: In the series' `rate_unit`.
        low, high: Of a new measurement, with probability `LEVEL` if the model holds; None where `note` says why.
        efficiency: Per worker, against the smallest measured count.
    """

    workers: int
    images_per_second: float
    low: float | None
    high: float | None
    efficiency: float
    note: str = ""


class LeftOutPoint(NamedTuple):
    """A measured point against its prediction from the other points; the error is a share of the measured value."""

    workers: int
    measured: float
    predicted: float
    relative_error: float


@dataclass(frozen=True)
class Model:
    """A series with the times that were fitted to `points` of it."""

    series: Series
    points: tuple[MeasuredPoint, ...]
    times: TimeModel
    knee: Knee | None
    per_step: bool

    def predict(self, workers: int) -> Prediction:
        """Throughput on `workers`, 1 or more."""
        if workers < 1:
            raise ValueError(f"a prediction needs 1 worker or more, got {workers}")
        rate = self._rate(workers, self.times.seconds(workers))
        base = self.series.points[0]
        share = rate / workers / (base.images_per_second / base.workers)
        width, note = self._width(workers)
        if width is None:
            return Prediction(workers, rate, None, None, share, note)
        return Prediction(workers, rate, rate / width, rate * width, share, note)

    def _rate(self, workers: int, seconds: float) -> float:
        """Of the work that `step_seconds` counts."""
        if not self.per_step:
            return (workers if self.series.mode == "weak" else 1) / seconds
        point = self.points[0]
        batch = point.global_batch or 1.0
        return (batch / point.workers * workers if self.series.mode == "weak" else batch) / seconds

    def _width(self, workers: int) -> tuple[float | None, str]:
        """The factor that the interval reaches to either side, or why there is none."""
        batch = self.points[0].global_batch
        if self.series.mode == "strong" and batch and workers > batch:
            return None, f"a global batch of {batch:.10g} has no sample for each worker"
        if self.knee and any(self.knee.parts(point.workers, workers) for point in self.points):
            return None, f"not to be trusted: the knee at {self.knee.workers} parts it from points that were fitted"
        parts = self.times.variances(workers)
        if any(variance is None for variance, _ in parts):
            return None, f"no interval: {self.times.no_variance}"
        total = sum(variance or 0.0 for variance, _ in parts)
        if not total:
            return 1.0, ""
        spread = math.sqrt(total) / self.times.seconds(workers) * t_quantile(LEVEL, self._degrees(parts, total))
        if spread > math.log(WIDEST):
            return None, f"no interval: wider than {WIDEST:g} times to either side"
        return math.exp(spread), ""

    @staticmethod
    def _degrees(parts: Sequence[Part], total: float) -> float:
        """Of a sum of variances that are known by different degrees of freedom (Welch and Satterthwaite)."""
        return total**2 / sum((variance or 0.0) ** 2 / degrees for variance, degrees in parts)

    @property
    def parameters(self) -> list[Parameter]:
        return self.times.parameters()

    @property
    def degrees_of_freedom(self) -> int:
        """Of the part that is known least."""
        return min(part.degrees for part in self.times.variances(self.points[-1].workers))

    @cached_property
    def leave_one_out(self) -> list[LeftOutPoint]:
        """Each fitted point predicted from the others, from which the first and the last are extrapolated."""
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
        """All points of the series, also those that were not fitted, against the model."""
        return [_error(point, self.predict(point.workers).images_per_second) for point in self.series.points]

    @property
    def remarks(self) -> list[str]:
        """What a reader must know beside the numbers, a sentence or two each."""
        remarks = [*remarks_of(self.series.points, self.knee), *self.times.remarks()]
        if any(point.split for point in self.points) and not can_measure(self.points):
            remarks.append("not all points have what their steps consist of, so throughput alone is fitted")
        if len(self.points) < len(self.series.points):
            counts = listed(str(point.workers) for point in self.points)
            remarks.append(f"fitted to {counts} workers alone; the other points check it")
        return remarks


def fit(series: Series, only: Collection[int] = ()) -> Model:
    """Fit the model to a series.

    Args:
        only: Fit to these numbers of workers alone; to all of them by default.

    Raises:
        DataError: Fewer than two numbers of workers, or `only` names one that was not measured.
    """
    measured = [point.workers for point in series.points]
    missing = sorted(set(only) - set(measured))
    if missing:
        raise DataError(
            f"{series.label}: {listed(map(str, missing))} workers were not measured; there are "
            f"{listed(map(str, measured))}"
        )
    points = tuple(point for point in series.points if not only or point.workers in only)
    if len(points) < 2:
        named = listed(str(point.workers) for point in points) if points else "no number"
        raise DataError(
            f"{series.label}: a fit needs two numbers of workers or more, and has {named}; measure more with "
            "`lockstep study scaling --np`"
        )
    return _fit(series, points)


def _fit(series: Series, points: tuple[MeasuredPoint, ...]) -> Model:
    knee = find_knee(series.points)
    if can_measure(points):
        return Model(series, points, fit_measured(points, series.mode), knee, per_step=True)
    per_step = all(point.global_batch for point in points)
    what = "training" if series.rate_unit == "trainings/s" else "image"
    unit = "s per step" if per_step else f"s per {what}" + (" of a worker" if series.mode == "weak" else "")
    times = fit_throughput(points, series.mode, per_step, unit)
    return Model(series, points, times, knee, per_step)


def _error(point: MeasuredPoint, predicted: float) -> LeftOutPoint:
    measured = point.images_per_second
    return LeftOutPoint(point.workers, measured, predicted, predicted / measured - 1)
