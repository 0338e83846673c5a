"""What a benchmark says: intervals of medians, and whether bars are met."""

from __future__ import annotations

import math
import random

import pytest
from harness import Bar, median_interval


@pytest.mark.parametrize(
    ("count", "low", "high"), [(2, 1, 2), (5, 1, 5), (6, 1, 6), (9, 2, 8), (11, 2, 10), (15, 4, 12), (41, 14, 28)]
)
def test_interval_of_a_median_lies_between_its_ordered_values(count: int, low: int, high: int) -> None:
    values = random.Random(0).sample(range(1, count + 1), count)
    assert median_interval([float(value) for value in values]) == [low, high]


def test_the_interval_holds_the_true_median_in_95_of_100_series() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(2000):
        low, high = median_interval([draw.expovariate(1.0) for _ in range(15)])
        held += low <= math.log(2) <= high
    assert 0.95 <= held / 2000 <= 0.98


@pytest.mark.parametrize(
    ("bar", "ratio", "interval", "verdict"),
    [
        (Bar("at most", 1.1), 1.05, [1.0, 1.2], "at most 1.1: met"),
        (Bar("at most", 1.1), 1.15, [1.0, 1.2], "at most 1.1: MISSED"),
        (Bar("at least", 1.6), 1.7, [1.5, 1.9], "at least 1.6: met"),
        (Bar("at least", 0.98, reaches=1.0), 0.99, [0.97, 1.01], "at least 0.98, its interval reaching 1.00: met"),
        (Bar("at least", 0.98, reaches=1.0), 0.99, [0.98, 0.995], "at least 0.98, its interval reaching 1.00: MISSED"),
        (Bar("at most", 1.02, reaches=1.0), 1.01, [1.005, 1.02], "at most 1.02, its interval reaching 1.00: MISSED"),
    ],
)
def test_bar_is_met_by_median_and_interval(bar: Bar, ratio: float, interval: list[float], verdict: str) -> None:
    assert bar.verdict(ratio, interval) == verdict
