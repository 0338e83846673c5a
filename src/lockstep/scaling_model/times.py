"""The time of one step on N workers, as a sum of terms, fitted to measured steps.

    time(N) = compute(N) + fixed + (1 - overlap) · communication(N)
    compute(N) = work / N (strong) or constant (weak)
    communication(N) = latency · log2(N) + bandwidth · (N - 1)/N

log2(N) counts the rounds of a tree, (N - 1)/N is the share of the gradients that each worker of a ring sends and
receives in each of its two phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lockstep.scaling_model.least_squares import LeastSquares, least_squares
from lockstep.scaling_model.series import MeasuredPoint, Mode

BANDWIDTH_COUNTS = 4  # of distinct counts above 1 before throughput alone can tell bandwidth from latency


class Parameter(NamedTuple):
    """A term of the model; `status` says how its value came about: "fitted", "fixed: why" or "measured: how"."""

    name: str
    value: float | None
    unit: str
    status: str


class Part(NamedTuple):
    """A share of a prediction's variance, with the degrees of freedom that it is known by."""

    variance: float | None
    degrees: int


class TimeModel(Protocol):
    """Seconds of a step by the number of workers."""

    def seconds(self, workers: int) -> float: ...

    def variances(self, workers: int) -> list[Part]:
        """Of a new measurement around `seconds`; the parts are independent."""
        ...

    def parameters(self) -> list[Parameter]: ...

    def remarks(self) -> list[str]: ...

    @property
    def no_variance(self) -> str:
        """Why there is no variance, where there is none."""
        ...

    @property
    def spare_points(self) -> int:
        """By how many the points outnumber the terms that are fitted to steps; without any, they test nothing."""
        ...


def step_seconds(point: MeasuredPoint, mode: Mode, per_step: bool) -> float:
    """Time of the constant work: a step where batches are known, else one image (weak: one of each worker)."""
    work = (point.global_batch or 1.0) if per_step else (point.workers if mode == "weak" else 1.0)
    return work / point.images_per_second


def local_row(mode: Mode, workers: int, terms: int) -> list[float]:
    """Compute, and fixed work where it can be told from it."""
    return [1 / workers, 1.0][:terms] if mode == "strong" else [1.0]


def communication_row(workers: int, terms: int) -> list[float]:
    return [math.log2(workers), (workers - 1) / workers][:terms]


@dataclass(frozen=True)
class ThroughputModel:
    """Fitted to throughput alone: its communication is what computing does not hide."""

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
            fixed = Parameter("fixed", None, self.unit, "fixed: as constant as compute, and counted there")
        elif len(local) > 1:
            fixed = Parameter("fixed", local[1], self.unit, _fitted(local[1]))
        else:
            fixed = Parameter("fixed", 0.0, self.unit, "fixed: two points identify two terms")
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
    return f"fitted{more}" + ("" if value > 0 else "; the points show none")


def fit_throughput(points: Sequence[MeasuredPoint], mode: Mode, per_step: bool, unit: str) -> ThroughputModel:
    """Fit as many terms as the points can tell apart.

    In the strong mode (N - 1)/N is a constant less 1/N: fixed work and compute have both already.
    """
    counts = len({point.workers for point in points if point.workers > 1})
    local = 1 if mode == "weak" or len(points) < 3 else 2
    if mode == "strong":
        communication, why = 1, "throughput alone cannot tell it from compute and fixed work"
    else:
        communication = 2 if counts >= BANDWIDTH_COUNTS else 1
        why = f"{counts} counts above 1 are too few to tell it from latency; {BANDWIDTH_COUNTS} are needed"
    values = [step_seconds(point, mode, per_step) for point in points]
    rows = [local_row(mode, p.workers, local) + communication_row(p.workers, communication) for p in points]
    return ThroughputModel(mode, unit, least_squares(rows, values, values), local, communication, why)
