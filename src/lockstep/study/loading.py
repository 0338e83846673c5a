"""The loading study: how fast training images load, by number of loader processes, beside a model's demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from lockstep.study.figures import Figure
from lockstep.train.monitoring.data_wait import count_processes

SUGGESTIONS = {
    "read": "pack the data set into large files (`lockstep data pack`), or use a faster disk",
    "decode": "use more cores per worker, a smaller --image-size, or smaller files (`lockstep data pack`)",
    "items": "make the items of your data set cheaper to load, or use more cores per worker",
    "augment": "use less augmentation, a smaller --image-size, or a larger -b",
}
ENOUGH_GAIN = 1.05
LITTLE = 0.05  # share of time spent waiting for data that is acceptable


@dataclass(frozen=True)
class LoadingStudy:
    """Measured rates: each stage on one core, the pipeline by number of loader processes, and the model's demand."""

    stages: Sequence[Figure]
    pipeline: dict[int, Figure]
    demand: Figure | None

    @property
    def limit(self) -> str:
        """The name of the slowest stage."""
        return min(self.stages, key=lambda stage: stage.images_per_second.median).name if self.stages else "augment"

    @property
    def waits(self) -> dict[int, float]:
        """The share of time that the model would wait, by number of loader processes; empty without a model."""
        if self.demand is None:
            return {}
        need = self.demand.images_per_second.median
        return {
            number: wait_share(number, each.images_per_second.median, need) for number, each in self.pipeline.items()
        }

    def verdict(self) -> list[str]:
        rates = {number: figure.images_per_second.median for number, figure in self.pipeline.items()}
        number = smallest_of_best(rates)
        best = rates[number]
        lines = [describe_stage(stage) for stage in self.stages]
        lines.append(f"the pipeline's best rate is {_rate(best)}, with {count_processes(number)}")
        if self.demand is None:
            return [*lines, "to compare this with a model's demand, add -a ARCH"]
        need, waits = self.demand.images_per_second.median, self.waits
        enough = next((processes for processes, wait in waits.items() if wait <= LITTLE), None)
        if enough is not None:
            return [*lines, f"the model needs {_rate(need)}: {_enough(enough)}"]
        least = min(waits, key=lambda processes: waits[processes])
        more = ", more than the pipeline delivers" if need > best else ""
        lines.append(
            f"the model needs {_rate(need)}{more}: with {count_processes(least)}, it would wait "
            f"{100 * waits[least]:.0f} % of the time"
        )
        if len(rates) > 1 and number == max(rates):  # the rate still grew
            lines.append(f"if the rate keeps growing with processes, {_enough(ceil(need / best * number))}")
        return [*lines, f"to speed up loading, {SUGGESTIONS[self.limit]}"]

    def to_mapping(self) -> dict[str, Any]:
        return {
            "kind": "loading",
            "units": "images per second: lower quartile, median, upper quartile",
            "stages": [stage.to_mapping() for stage in self.stages],
            "pipeline": [{"processes": number, **figure.to_mapping()} for number, figure in self.pipeline.items()],
            "demand": self.demand.to_mapping() if self.demand else None,
            "limit": self.limit,
            "verdict": self.verdict(),
        }


def wait_share(processes: int, rate: float, need: float) -> float:
    """Return the share of time that a model waits, if it consumes `need` images/s and the pipeline delivers `rate`.

    Loader processes work while the model computes; without them (0), each batch is loaded between steps.
    """
    return need / (need + rate) if processes == 0 else max(0.0, 1 - rate / need)


def describe_stage(stage: Figure) -> str:
    """Return the rate of a stage; of reading, also how much came from storage instead of the page cache."""
    size, stored = sum(turn.size_bytes for turn in stage.turns), [turn.storage_bytes for turn in stage.turns]
    more = ""
    if size:
        more = f", {size / sum(turn.seconds for turn in stage.turns) / 1e6:,.0f} MB/s"
        counted = [each for each in stored if each is not None]
        if len(counted) == len(stored):
            more += f", {100 * min(1.0, sum(counted) / size):.0f} % from storage"
    return f"{stage.name}: {_rate(stage.images_per_second.median)}{more} ({stage.about})"


def _enough(number: int) -> str:
    return f"{count_processes(number)} per worker {'is' if number == 1 else 'are'} enough"


def _rate(images_per_second: float) -> str:
    return f"{images_per_second:,.0f} images/s" if images_per_second >= 10 else f"{images_per_second:.2g} images/s"


def candidates(cores: int) -> list[int]:
    """Return the numbers of processes to try for a number of cores: powers of two, and all cores."""
    powers = [1 << exponent for exponent in range(cores.bit_length()) if 1 << exponent < cores]
    return [*powers, cores]


def smallest_of_best(rates: dict[int, float]) -> int:
    """Return the smallest number of processes whose rate is within 5 % of the best."""
    best = max(rates.values())
    return min(processes for processes, rate in rates.items() if rate * ENOUGH_GAIN >= best)
