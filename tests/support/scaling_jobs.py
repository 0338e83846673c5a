"""Generate records of `lockstep study scaling` for a simulated job with known parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.files.jsonl import read_records
from lockstep.report.scaling_series import Series, series_of

PUBLISHED = Path(__file__).parents[2] / "examples" / "studies" / "published.jsonl"


def published() -> dict[str, Series]:
    """Return the published series, by data set."""
    records = list(read_records(PUBLISHED))
    series, warnings = series_of(records)
    assert not warnings
    return dict(zip(dict.fromkeys(record["data"] for record in records), series, strict=True))


def record(workers: int, images_per_second: float | None, mode: str = "weak", **more: Any) -> dict[str, Any]:
    fields = {"kind": "scaling", "modes": [mode], "workers": workers, "repeat": 0, "job": "0badcafe"}
    return {**fields, "images_per_second": images_per_second, **more}


@dataclass(frozen=True)
class Job:
    """A job that follows the scaling model exactly, except for noise; times in seconds per step of 256 samples."""

    mode: str
    compute: float
    fixed: float = 0.0
    latency: float = 0.0
    bandwidth: float = 0.0

    def records(
        self, counts: Iterable[int], noise: float = 0.0, draws: np.random.Generator | None = None, repeats: int = 1
    ) -> list[dict[str, Any]]:
        """Return records in which each measured value has independent log-normal noise."""
        draws = draws or np.random.default_rng(0)
        return [self._record(workers, repeat, noise, draws) for workers in counts for repeat in range(repeats)]

    def series(
        self, counts: Iterable[int], noise: float = 0.0, draws: np.random.Generator | None = None, repeats: int = 1
    ) -> Series:
        (series,), warnings = series_of(self.records(counts, noise, draws, repeats))
        assert not warnings
        return series

    def _record(self, workers: int, repeat: int, noise: float, draws: np.random.Generator) -> dict[str, Any]:
        rate = self.rate(workers) * math.exp(noise * draws.standard_normal())
        return record(workers, rate, self.mode, repeat=repeat)

    def rate(self, workers: int) -> float:
        """Return images per second, without noise."""
        local = self.compute / (workers if self.mode == "strong" else 1) + self.fixed
        seconds = local + self.latency * math.log2(workers) + self.bandwidth * (workers - 1) / workers
        return 256 * (workers if self.mode == "weak" else 1) / seconds
