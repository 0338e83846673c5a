"""Repeat measurements, and summarize them as medians with quartiles."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, NamedTuple

import psutil

Work = Callable[[], tuple[int, int]]  # processes a batch; returns its images, and the bytes that were read


class Turn(NamedTuple):
    """One repeat of a measurement.

    Args:
        size_bytes: Bytes that were read.
        storage_bytes: Those that storage delivered; None if the system does not count them.
    """

    seconds: float
    images: int
    size_bytes: int = 0
    storage_bytes: int | None = None


class Spread(NamedTuple):
    """Lower quartile, median and upper quartile."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Figure:
    """The repeats of one measurement, and their rates."""

    name: str
    about: str
    turns: Sequence[Turn]

    @property
    def images_per_second(self) -> Spread:
        return spread([turn.images / turn.seconds for turn in self.turns])

    def to_mapping(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "about": self.about,
            "images_per_second": self.images_per_second._asdict(),
            "repeats": [turn._asdict() for turn in self.turns],
        }


def measure(work: Work, repeats: int, seconds: float, wait: Callable[[], None] = lambda: None) -> list[Turn]:
    """Repeat `work` for `seconds` in each turn, after one warm-up call; `wait`, at the end, waits for a device."""
    work()
    turns = []
    for _ in range(repeats):
        images = size_bytes = 0
        before, start = _storage_bytes(), time.perf_counter()
        while time.perf_counter() - start < seconds or not images:
            done = work()
            images, size_bytes = images + done[0], size_bytes + done[1]
        wait()
        elapsed, after = time.perf_counter() - start, _storage_bytes()
        turns.append(Turn(elapsed, images, size_bytes, None if before is None or after is None else after - before))
    return turns


def _storage_bytes() -> int | None:
    """Return the bytes that storage has delivered to this process; None if the system does not count them."""
    if sys.platform == "linux":  # other systems count reads from the page cache, too
        with suppress(psutil.Error, OSError):
            return int(psutil.Process().io_counters().read_bytes)
    return None


def spread(values: Sequence[float]) -> Spread:
    """Return the quartiles of repeated measurements; a single value is returned three times."""
    return (
        Spread(*quantiles(values, method="inclusive")) if len(values) > 1 else Spread(values[0], values[0], values[0])
    )
