"""The loading study: how fast training images load, by number of loader processes, beside a model's demand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, NamedTuple

from lockstep.train.monitoring.data_wait import count_processes

SUGGESTIONS = {
    "read": "pack the data set into large files (`lockstep data pack`), or use a faster disk",
    "decode": "use more cores per worker, a smaller --image-size, or smaller files (`lockstep data pack`)",
    "items": "make the items of your data set cheaper to load, or use more cores per worker",
    "augment": "use less augmentation, a smaller --image-size, or a larger -b",
}
LITTLE = 0.05  # share of time spent waiting for data that is acceptable
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


@dataclass(frozen=True)
class LoadingStudy:
    """Measured rates: each stage on one core, the pipeline by number of loader processes, and the model's demand."""

    stages: Sequence[Figure]
    pipeline: dict[int, Figure]
    demand: Figure

    @property
    def limit(self) -> str:
        """The name of the slowest stage."""
        return min(self.stages, key=lambda stage: stage.images_per_second.median).name if self.stages else "augment"

    @property
    def waits(self) -> dict[int, float]:
        """The share of time that the model would wait, by number of loader processes."""
        need = self.demand.images_per_second.median
        return {
            number: wait_share(number, figure.images_per_second.median, need)
            for number, figure in self.pipeline.items()
        }

    def verdict(self) -> list[str]:
        waits = self.waits
        least = min(waits, key=lambda number: (max(waits[number], LITTLE), number))
        processes = f"with {count_processes(least)} per worker, it waits {100 * waits[least]:.0f} % of the time"
        lines = [f"{stage.name}: {_rate(stage)} ({stage.about})" for stage in self.stages]
        lines.append(f"the model needs {_rate(self.demand)}: {processes}")
        return lines if waits[least] <= LITTLE else [*lines, f"to speed up loading, {SUGGESTIONS[self.limit]}"]

    def to_mapping(self) -> dict[str, Any]:
        return {
            "kind": "loading",
            "units": "images per second: lower quartile, median, upper quartile",
            "stages": [stage.to_mapping() for stage in self.stages],
            "pipeline": [{"processes": number, **figure.to_mapping()} for number, figure in self.pipeline.items()],
            "demand": self.demand.to_mapping(),
            "limit": self.limit,
            "verdict": self.verdict(),
        }


def wait_share(processes: int, rate: float, need: float) -> float:
    """Return the share of time that a model waits, if it consumes `need` images/s and the pipeline delivers `rate`.

    Loader processes work while the model computes; without them (0), each batch is loaded between steps.
    """
    return need / (need + rate) if processes == 0 else max(0.0, 1 - rate / need)


def _rate(figure: Figure) -> str:
    median = figure.images_per_second.median
    return f"{median:,.0f} images/s" if median >= 10 else f"{median:.2g} images/s"


def candidates(cores: int) -> list[int]:
    """Return the numbers of processes to try for a number of cores: none, powers of two, and all cores."""
    return [0, *(1 << exponent for exponent in range(cores.bit_length()) if 1 << exponent < cores), cores]
