"""The model fitted to measured parts of a step: local work, communication alone, and its exposed share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.scaling_model.least_squares import LeastSquares, least_squares
from lockstep.scaling_model.series import MeasuredPoint, Mode
from lockstep.scaling_model.times import Parameter, Part, communication_row, local_row

EXPOSED = "communication_exposed"
PER_STEP = "s per step"
SLOW = 1.15  # report a slowdown of local work, relative to the fewest workers, from this factor on
BOUND = 0.95  # a step with a larger share of communication is communication-bound and shows no overlap


class Slowed(NamedTuple):
    """Local work of a step that takes `factor` times as long with `workers` as with `fewest` workers."""

    workers: int
    fewest: int
    factor: float


@dataclass(frozen=True)
class MeasuredModel:
    """Separate fits of a worker's local work, of communication alone, and of its exposed share."""

    mode: Mode
    local: LeastSquares
    alone: LeastSquares
    exposed: LeastSquares
    slowed: Slowed | None = None

    def _rows(self, workers: int) -> tuple[list[float], list[float]]:
        terms = len(self.local.coefficients), len(self.alone.coefficients)
        return local_row(self.mode, workers, terms[0]), communication_row(workers, terms[1])

    @property
    def _share(self) -> float:
        return float(self.exposed.coefficients[0])

    def seconds(self, workers: int) -> float:
        """Return the time of a step, which is at least its communication."""
        local, communication = self._rows(workers)
        alone = self.alone.value(communication)
        return max(self.local.value(local) + self._share * alone, alone)

    def variances(self, workers: int) -> list[Part]:
        """Return the variances of the three fits, with the noise of local work and of exposed communication added."""
        fits = (self.local, self.alone, self.exposed)
        local, alone, exposed = (fit.noise for fit in fits)
        if local is None or alone is None or exposed is None:
            return [Part(None, 0)]
        row, communication = self._rows(workers)
        total, seconds = self.seconds(workers) ** 2, self.alone.value(communication) ** 2
        of_alone = self.alone.variance(communication) or 0.0
        if total == seconds:  # communication-bound
            return [Part(of_alone + alone * total, self.alone.degrees)]
        variances = (
            (self.local.variance(row) or 0.0) + local * total,
            of_alone * self._share**2,
            (self.exposed.variance([1.0]) or 0.0) * seconds + exposed * total,
        )
        return [Part(variance, fit.degrees) for variance, fit in zip(variances, fits, strict=True)]

    def parameters(self) -> list[Parameter]:
        local, alone = self.local.coefficients.tolist(), self.alone.coefficients.tolist()
        steps = "measured: step time minus exposed communication"
        all_reduce = "measured: all-reduce of the gradients alone"
        fixed = (
            Parameter("fixed", None, PER_STEP, "fixed: included in compute, as both are constant")
            if self.mode == "weak"
            else Parameter("fixed", local[1], PER_STEP, steps)
        )
        bandwidth = (
            Parameter("bandwidth", alone[1], PER_STEP, all_reduce)
            if len(alone) > 1
            else Parameter("bandwidth", 0.0, PER_STEP, "fixed: with one count above 1, included in latency")
        )
        return [
            Parameter("compute", local[0], PER_STEP, steps),
            fixed,
            Parameter("latency", alone[0], f"{PER_STEP} and round", all_reduce),
            bandwidth,
            Parameter(
                "overlap", max(0.0, 1 - self._share), "", "measured: exposed communication over all-reduce alone"
            ),
        ]

    @property
    def no_variance(self) -> str:
        return "a part of the step was measured on only as many numbers of workers as it has parameters"

    @property
    def spare_points(self) -> int:
        return self.local.degrees

    def remarks(self) -> list[str]:
        remarks = []
        if self._share > 1:
            remarks.append(
                f"exposed communication takes {self._share:.2f} times as long as the all-reduce alone: workers also "
                "wait for each other"
            )
        if self.slowed:
            remarks.append(
                f"with {self.slowed.workers} workers, each worker's local work takes {self.slowed.factor:.2f} times as "
                f"long as with {self.slowed.fewest}: workers share a resource, such as cores or memory bandwidth. The "
                "model has no term for this"
            )
        return remarks


def can_measure(points: Sequence[MeasuredPoint]) -> bool:
    """Whether all points have a batch and a split, and communication alone was measured with more than 1 worker."""
    alone = any(point.communication_alone for point in points if point.workers > 1)
    return alone and all(_has_parts(point) for point in points)


def _has_parts(point: MeasuredPoint) -> bool:
    """Whether the point's batch and exposed communication are known and the step has other parts."""
    exposed = (point.split or {}).get(EXPOSED)
    return point.global_batch is not None and exposed is not None and exposed < _step(point)


def _step(point: MeasuredPoint) -> float:
    return (point.global_batch or 1.0) / point.images_per_second


def fit_measured(points: Sequence[MeasuredPoint], mode: Mode) -> MeasuredModel:
    """Fit each part to its measurements."""
    steps = {point.workers: _step(point) for point in points}
    waits = {point.workers: (point.split or {}).get(EXPOSED, 0.0) for point in points}
    own = {workers: steps[workers] - waits[workers] for workers in sorted(steps)}
    local = least_squares(
        [local_row(mode, workers, 1 if mode == "weak" else 2) for workers in steps],
        [own[workers] for workers in steps],
        list(steps.values()),
    )
    timed = {p.workers: p.communication_alone for p in points if p.workers > 1 and p.communication_alone}
    terms = 2 if len(timed) > 1 else 1
    times = list(timed.values())
    alone = least_squares([communication_row(workers, terms) for workers in timed], times, times)
    together = {workers: alone.value(communication_row(workers, terms)) for workers in steps if workers > 1}
    usable = [workers for workers, seconds in together.items() if seconds < BOUND * steps[workers]] or list(together)
    exposed = least_squares(
        [[together[workers]] for workers in usable],
        [waits[workers] for workers in usable],
        [steps[workers] for workers in usable],
    )
    return MeasuredModel(mode, local, alone, exposed, _slowed(own) if mode == "weak" else None)


def _slowed(own: dict[int, float]) -> Slowed | None:
    """Return the largest slowdown of the same local work on more workers, if it reaches SLOW."""
    fewest, workers = min(own), max(own, key=lambda workers: own[workers])
    factor = own[workers] / own[fewest] if own[fewest] > 0 else 1.0
    return Slowed(workers, fewest, factor) if workers > fewest and factor >= SLOW else None
