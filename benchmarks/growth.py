"""Fit the growth of a cost with the number of workers: the better of a + b·N and a + b·log2(N)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

FORMS: dict[str, Callable[[int], float]] = {"N": float, "log2 N": math.log2}


class Growth(NamedTuple):
    """A least-squares fit of relative errors.

    Args:
        error: Root mean square of the points' relative leave-one-out errors.
    """

    form: str
    fixed: float
    slope: float
    error: float

    def __str__(self) -> str:
        sign = "+" if self.slope >= 0 else "-"
        return f"{self.fixed:.4g} {sign} {abs(self.slope):.4g}·{self.form} (left out: {self.error:.0%})"

    def at(self, workers: int) -> float:
        return self.fixed + self.slope * FORMS[self.form](workers)


def fit_growth(costs: Mapping[int, float]) -> Growth:
    """Fit both forms to at least three costs by number of workers; return the one with the smaller error."""
    return min((_fit_form(form, costs) for form in FORMS), key=lambda growth: growth.error)


def _fit_form(form: str, costs: Mapping[int, float]) -> Growth:
    errors = []
    for left_out, cost in costs.items():
        fixed, slope = _line(form, {workers: other for workers, other in costs.items() if workers != left_out})
        errors.append((fixed + slope * FORMS[form](left_out)) / cost - 1)
    return Growth(form, *_line(form, costs), float(np.sqrt(np.mean(np.square(errors)))))


def _line(form: str, costs: Mapping[int, float]) -> tuple[float, float]:
    values = np.asarray(list(costs.values()))
    columns = np.stack([np.ones(len(costs)), np.asarray([FORMS[form](workers) for workers in costs])], 1)
    fixed, slope = np.linalg.lstsq(columns / values[:, None], np.ones(len(costs)), rcond=None)[0].tolist()
    return fixed, slope
