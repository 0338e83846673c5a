"""The time of one step on N workers, as a sum of terms, fitted to measured steps.

    time(N) = compute(N) + fixed + (1 - overlap) · communication(N)
    compute(N) = work / N (strong) or constant (weak)
    communication(N) = latency · log2(N) + bandwidth · (N - 1)/N

log2(N) is the number of rounds of a tree. (N - 1)/N is the share of the gradients that each worker in a ring sends and
receives in each of the two phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lockstep.scaling_model.least_squares import LeastSquares, least_squares
from lockstep.scaling_model.series import MeasuredPoint, Mode

BANDWIDTH_COUNTS = 4  # distinct counts above 1 needed to separate bandwidth from latency by throughput alone


class Parameter(NamedTuple):
    """A term of the model; `status` is the source of its value: "fitted", "fixed: why" or "measured: how"."""

    name: str
    value: float | None
    unit: str
    status: str


class Part(NamedTuple):
    """A part of a prediction's variance, with its degrees of freedom."""

    variance: float | None
    degrees: int


class TimeModel(Protocol):
    """The time of a step, in seconds, as a function of the number of workers."""

    def seconds(self, workers: int) -> float: ...

    def variances(self, workers: int) -> list[Part]:
        """Return the independent parts of a new measurement's variance around `seconds`."""
        ...

    def parameters(self) -> list[Parameter]: ...

    def remarks(self) -> list[str]: ...

    @property
    def no_variance(self) -> str:
        """The reason if there is no variance."""
        ...

    @property
    def spare_points(self) -> int:
        """Number of points minus number of terms fitted to steps; with 0, the points cannot test the model."""
        ...


def step_seconds(point: MeasuredPoint, mode: Mode, per_step: bool) -> float:
    """Return the time of a step if batches are known, else of one image (weak scaling: one image per worker)."""
    work = (point.global_batch or 1.0) if per_step else (point.workers if mode == "weak" else 1.0)
    return work / point.images_per_second


def local_row(mode: Mode, workers: int, terms: int) -> list[float]:
    """Return the row of compute and, if it can be separated from compute, fixed work."""
    return [1 / workers, 1.0][:terms] if mode == "strong" else [1.0]


def communication_row(workers: int, terms: int) -> list[float]:
    return [math.log2(workers), (workers - 1) / workers][:terms]


@dataclass(frozen=True)
class ThroughputModel:
    """A model fitted to throughput alone; its communication is only the exposed part."""

    mode: Mode
    unit: str
    fit: LeastSquares
    local_terms: int
    communication_terms: int
    no_bandwidth: str

    def _row(self, workers: int) -> list[float]:
        return local_row(self.mode, workers, self.local_terms) + communication_row(workers, self.communication_terms)

    def seconds(self, workers: int) -> float:
        return self.fit.value(self._row(workers))

    def variances(self, workers: int) -> list[Part]:
        coefficients = self.fit.variance(self._row(workers))
        if coefficients is None or self.fit.noise is None:
            return [Part(None, 0)]
        return [Part(coefficients + self.fit.noise * self.seconds(workers) ** 2, self.fit.degrees)]

    def parameters(self) -> list[Parameter]:
        values = self.fit.coefficients.tolist()
        local, communication = values[: self.local_terms], values[self.local_terms :]
        if self.mode == "weak":
            fixed = Parameter("fixed", None, self.unit, "fixed: included in compute, as both are constant")
        elif len(local) > 1:
            fixed = Parameter("fixed", local[1], self.unit, _fitted(local[1]))
        else:
            fixed = Parameter("fixed", 0.0, self.unit, "fixed: two points determine only two terms")
        exposed = ", the exposed part"
        bandwidth = (
            Parameter("bandwidth", communication[1], self.unit, _fitted(communication[1], exposed))
            if len(communication) > 1
            else Parameter("bandwidth", 0.0, self.unit, f"fixed: {self.no_bandwidth}")
        )
        return [
            Parameter("compute", local[0], self.unit, "fitted"),
            fixed,
            Parameter("latency", communication[0], f"{self.unit} and round", _fitted(communication[0], exposed)),
            bandwidth,
            Parameter("overlap", None, "", "fixed: throughput alone shows no hidden communication"),
        ]

    def remarks(self) -> list[str]:
        return []

    @property
    def no_variance(self) -> str:
        return "as many parameters as points"

    @property
    def spare_points(self) -> int:
        return self.fit.degrees


def _fitted(value: float, more: str = "") -> str:
    return f"fitted{more}" + ("" if value > 0 else "; none in the points")


def fit_throughput(points: Sequence[MeasuredPoint], mode: Mode, per_step: bool, unit: str) -> ThroughputModel:
    """Fit as many terms as the points can separate.

    For strong scaling, (N - 1)/N is a constant minus 1/N, which fixed work and compute already cover.
    """
    counts = len({point.workers for point in points if point.workers > 1})
    local = 1 if mode == "weak" or len(points) < 3 else 2
    if mode == "strong":
        communication, why = 1, "throughput alone cannot separate it from compute and fixed work"
    else:
        communication = 2 if counts >= BANDWIDTH_COUNTS else 1
        why = f"separating it from latency needs {BANDWIDTH_COUNTS} counts above 1, got {counts}"
    values = [step_seconds(point, mode, per_step) for point in points]
    rows = [local_row(mode, p.workers, local) + communication_row(p.workers, communication) for p in points]
    return ThroughputModel(mode, unit, least_squares(rows, values, values), local, communication, why)
