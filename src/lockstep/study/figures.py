"""Repeat measurements, and summarize them as medians with quartiles."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any, NamedTuple

Work = Callable[[], int]  # processes a batch; returns the number of its images
REPEATS = 5


class Spread(NamedTuple):
    """Lower quartile, median and upper quartile."""

    low: float
    median: float
    high: float


class Figure(NamedTuple):
    """A measured rate."""

    name: str
    about: str
    images_per_second: Spread

    def to_mapping(self) -> dict[str, Any]:
        return {"name": self.name, "about": self.about, "images_per_second": self.images_per_second._asdict()}


def measure(work: Work, seconds: float, wait: Callable[[], None] = lambda: None) -> Spread:
    """Return the images per second of `work`, which is repeated for `seconds` several times, after one warm-up call.

    Args:
        wait: Waits for a device, at the end.
    """
    work()
    rates = []
    for _ in range(REPEATS):
        images, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds or not images:
            images += work()
        wait()
        rates.append(images / (time.perf_counter() - start))
    return Spread(*quantiles(rates, method="inclusive"))
