"""Comparing samples of two distributions, after Kolmogorov and Smirnov."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def distance(a: Any, b: Any) -> float:
    """The largest difference between the shares of two samples that lie below any point."""
    points = np.union1d(a, b)
    shares = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def largest_distance(a: int, b: int) -> float:
    """What the distance of two samples of a and b items from one distribution passes once in a thousand times."""
    return 1.95 * math.sqrt((a + b) / (a * b))
