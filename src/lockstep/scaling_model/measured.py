"""The model from measured parts of a step: computing, communication alone, and how much of it is exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.scaling_model.least_squares import LeastSquares, least_squares
from lockstep.scaling_model.series import Mode, Point
from lockstep.scaling_model.times import Parameter, Part, communication_row, local_row, step_seconds

EXPOSED = "communication_exposed"
PER_STEP = "s per step"


@dataclass(frozen=True)
class MeasuredModel:
    """Each part is fitted to its own measurements: a worker's own work, communication alone, its exposed share."""

    mode: Mode
    local: LeastSquares
    alone: LeastSquares
    exposed: LeastSquares
    points: Sequence[Point]

    def _rows(self, workers: int) -> tuple[list[float], list[float]]:
        terms = len(self.local.coefficients), len(self.alone.coefficients)
        return local_row(self.mode, workers, terms[0]), communication_row(workers, terms[1])

    @property
    def _share(self) -> float:
        return float(self.exposed.coefficients[0])

    def seconds(self, workers: int) -> float:
        local, communication = self._rows(workers)
        return self.local.value(local) + self._share * self.alone.value(communication)

    def variances(self, workers: int) -> list[Part]:
        """Of the three fits; a new measurement has the noise of own work and of exposed communication."""
        fits = (self.local, self.alone, self.exposed)
        local, alone, exposed = (fit.noise for fit in fits)
        if local is None or alone is None or exposed is None:
            return [Part(None, 0)]
        row, communication = self._rows(workers)
        noise = self.seconds(workers) ** 2
        share, seconds = self._share**2, self.alone.value(communication) ** 2
        variances = (
            (self.local.variance(row) or 0.0) + local * noise,
            (self.alone.variance(communication) or 0.0) * share,
            (self.exposed.variance([1.0]) or 0.0) * seconds + exposed * noise,
        )
        return [Part(variance, fit.degrees) for variance, fit in zip(variances, fits, strict=True)]

    def parameters(self) -> list[Parameter]:
        local, alone = self.local.coefficients.tolist(), self.alone.coefficients.tolist()
        steps = "measured: steps less their exposed communication"
        all_reduce = "measured: all-reduce of the gradients alone"
        fixed = (
            Parameter("fixed", None, PER_STEP, "fixed: as constant as compute, and counted there")
            if self.mode == "weak"
            else Parameter("fixed", local[1], PER_STEP, steps)
        )
        bandwidth = (
            Parameter("bandwidth", alone[1], PER_STEP, all_reduce)
            if len(alone) > 1
            else Parameter("bandwidth", 0.0, PER_STEP, "fixed: one count above 1 cannot tell it from latency")
        )
        return [
            Parameter("compute", local[0], PER_STEP, steps),
            fixed,
            Parameter("latency", alone[0], f"{PER_STEP} and round", all_reduce),
            bandwidth,
            Parameter(
                "overlap", max(0.0, 1 - self._share), "", "measured: exposed communication against all-reduce alone"
            ),
        ]

    def remarks(self) -> list[str]:
        if self._share <= 1:
            return []
        return [
            f"steps wait {self._share:.2f} times as long for communication as it takes alone: workers also wait for "
            "each other"
        ]


def can_measure(points: Sequence[Point]) -> bool:
    """Whether the points carry what this model needs: batches, splits, and communication alone at a count above 1."""
    return all(
        point.global_batch is not None and point.split is not None and EXPOSED in point.split for point in points
    ) and any(point.communication_alone for point in points if point.workers > 1)


def fit_measured(points: Sequence[Point], mode: Mode) -> MeasuredModel:
    """Fit each part to its measurements."""
    steps = [step_seconds(point, mode, per_step=True) for point in points]
    waits = [(point.split or {}).get(EXPOSED, 0.0) for point in points]
    together = [(p, step, wait) for p, step, wait in zip(points, steps, waits, strict=True) if p.workers > 1]
    local_terms = 1 if mode == "weak" else 2
    local = least_squares(
        [local_row(mode, point.workers, local_terms) for point in points],
        [max(0.0, step - wait) for step, wait in zip(steps, waits, strict=True)],
        steps,
    )
    timed = [(p.workers, p.communication_alone) for p, _, _ in together if p.communication_alone]
    alone = least_squares(
        [communication_row(workers, 2 if len(timed) > 1 else 1) for workers, _ in timed],
        [seconds for _, seconds in timed],
        [seconds for _, seconds in timed],
    )
    terms = len(alone.coefficients)
    exposed = least_squares(
        [[alone.value(communication_row(point.workers, terms))] for point, _, _ in together],
        [wait for _, _, wait in together],
        [step for _, step, _ in together],
    )
    return MeasuredModel(mode, local, alone, exposed, points)
