"""The two-sample Kolmogorov-Smirnov test."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def distance(a: Any, b: Any) -> float:
    """Return the largest difference between the empirical distribution functions of two samples."""
    points = np.union1d(a, b)
    shares = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def largest_distance(a: int, b: int) -> float:
    """Return the critical distance at p = 0.001 for two samples of a and b items from one distribution."""
    return 1.95 * math.sqrt((a + b) / (a * b))
