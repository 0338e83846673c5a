"""Nonnegative least squares, and the quantiles of Student's t-distribution for its intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Row = Sequence[float]


@dataclass(frozen=True)
class LeastSquares:
    """A fit that assumes errors in proportion to the scale of each value.

    Args:
        coefficients: One nonnegative coefficient per column; the first is positive unless all values are 0.
        noise: Variance of the residuals relative to the scales; None without degrees of freedom.
        degrees: Degrees of freedom: values minus columns, even if a coefficient is 0.
    """

    coefficients: NDArray[np.float64]
    noise: float | None
    degrees: int
    _inverse: NDArray[np.float64]

    def value(self, row: Row) -> float:
        return float(np.dot(row, self.coefficients))

    def variance(self, row: Row) -> float | None:
        """Return the variance of `value` due to the coefficients' uncertainty; None without degrees of freedom."""
        return None if self.noise is None else self.noise * float(np.dot(row, self._inverse @ np.asarray(row)))


def least_squares(rows: Sequence[Row], values: Sequence[float], scales: Sequence[float]) -> LeastSquares:
    """Fit values by rows · coefficients, weighting each by 1/scale.

    Tries every subset of the (at most three) columns that includes the first one, and returns the best fit without a
    negative coefficient.
    """
    weights = 1 / np.asarray(scales, dtype=float)
    design = np.asarray(rows, dtype=float) * weights[:, None]
    target = np.asarray(values, dtype=float) * weights
    count, columns = design.shape
    best, least = np.zeros(columns), float(target @ target)
    for size in range(columns):
        for others in combinations(range(1, columns), size):
            chosen = [0, *others]
            found = np.linalg.lstsq(design[:, chosen], target, rcond=None)[0]
            squares = float(np.sum((design[:, chosen] @ found - target) ** 2))
            if found[0] > 0 and (found >= 0).all() and squares < least:
                best, least = np.zeros(columns), squares
                best[chosen] = found
    degrees = max(0, count - columns)
    return LeastSquares(best, least / degrees if degrees else None, degrees, _inverse(design))


def _inverse(design: NDArray[np.float64]) -> NDArray[np.float64]:
    """Invert the normal matrix; columns are normalized first, as seconds and shares differ by orders of magnitude."""
    lengths = np.linalg.norm(design, axis=0)
    lengths[lengths == 0] = 1
    unit = design / lengths
    inverse: NDArray[np.float64] = np.linalg.pinv(unit.T @ unit) / np.outer(lengths, lengths)
    return inverse


def t_quantile(level: float, degrees: float) -> float:
    """Return t such that a value of Student's t-distribution lies within [-t, t] with probability `level`.

    With t = √degrees · tan(angle) the density is cos(angle)^(degrees - 1), which is integrated numerically.
    """
    angles = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos((angles[1:] + angles[:-1]) / 2) ** (degrees - 1)
    share = np.concatenate([[0.0], np.cumsum(density)]) / np.sum(density)
    return float(np.sqrt(degrees) * np.tan(np.interp(level, share, angles)))
