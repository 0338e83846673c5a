"""Measure how fast training images load (each stage alone, then the pipeline) and how fast a model consumes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, count
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.config.schema import NumericsConfig
from lockstep.data.loaders import reader_for
from lockstep.data.readers import Reader
from lockstep.data.sets import MemorySplit
from lockstep.models import registry
from lockstep.study.figures import ComparisonTurn, Figure, ReadCounter, repeat
from lockstep.study.stages import Setting, orders, stages_of
from lockstep.train.guards.checks import check_model
from lockstep.train.monitoring.data_wait import count_processes
from lockstep.train.precision import build_precision
from lockstep.world import accelerator

PLAN_IMAGES = 1 << 14
SUGGESTIONS = {
    "read": "pack the data set into large files (`lockstep data pack`), or use a faster disk",
    "decode": "use more cores per worker, a smaller --image-size, or smaller files (`lockstep data pack`)",
    "items": "make the items of your data set cheaper to load, or use more cores per worker",
    "collate": "use a smaller --image-size, or more loader processes",
    "augment": "use less augmentation",
    "copy": "use a smaller --image-size, or a larger -b",
    "pick": "use a larger -b",
}


ENOUGH_GAIN = 1.05
LITTLE = 0.05  # share of time spent waiting for data that is acceptable


def wait_share(processes: int, rate: float, need: float) -> float:
    """Return the share of time that a model waits, if it consumes `need` images/s and the pipeline delivers `rate`.

    Loader processes work while the model computes; without them (0), each batch is loaded between steps.
    """
    return need / (need + rate) if processes == 0 else max(0.0, 1 - rate / need)


@dataclass(frozen=True)
class StageLength:
    """How long to measure each stage: `repeats` times `seconds`, after a warm-up."""

    repeats: int
    seconds: float


@dataclass(frozen=True)
class LoadingStudy:
    """Measured rates: each stage on one core, the pipeline by number of loader processes, and the model's demand."""

    stages: Sequence[Figure]
    pipeline: dict[int, Figure]
    demand: Figure | None

    @property
    def limit(self) -> Figure:
        """The slowest stage."""
        return min(self.stages, key=lambda stage: stage.images_per_second.median)

    def verdict(self) -> list[str]:
        rates = {processes: figure.images_per_second.median for processes, figure in self.pipeline.items()}
        number = smallest_of_best(rates)
        best, limit = rates[number], self.limit
        lines = [
            f"the slowest stage is {limit.name}: {_rate(limit.images_per_second.median)} on one core",
            f"the pipeline's best rate is {_rate(best)}, with {count_processes(number)}",
        ]
        if self.demand is None:
            return [*lines, "to compare this with a model's demand, add -a ARCH"]
        need = self.demand.images_per_second.median
        waits = {processes: wait_share(processes, rate, need) for processes, rate in sorted(rates.items())}
        enough = next((processes for processes, wait in waits.items() if wait <= LITTLE), None)
        if enough is not None:
            return [*lines, f"the model needs {_rate(need)}: {_enough(enough)}"]
        least = min(waits, key=lambda processes: waits[processes])
        lines.append(
            f"the model needs {_rate(need)}, more than the pipeline delivers: with {count_processes(least)}, the model "
            f"would wait {100 * waits[least]:.0f} % of the time"
        )
        if len(rates) > 1 and number == max(rates):  # the rate still grew
            lines.append(f"if the rate keeps growing with processes, {_enough(ceil(need / best * number))}")
        return [*lines, f"to speed up loading, {SUGGESTIONS[limit.name]}"]

    def to_mapping(self) -> dict[str, Any]:
        return {
            "kind": "loading",
            "units": "images, bytes and read operations per second: lower quartile, median, upper quartile",
            "stages": [stage.to_mapping() for stage in self.stages],
            "pipeline": [{"processes": number, **figure.to_mapping()} for number, figure in self.pipeline.items()],
            "demand": self.demand.to_mapping() if self.demand else None,
            "limit": self.limit.name,
            "verdict": self.verdict(),
        }


def check(setting: Setting) -> None:
    """Check that the augmentation suits the data set, before measuring.

    Raises:
        ConfigError: The augmentation is not available for this kind of data set.
    """
    _reader(setting, 0).close()


def _reader(setting: Setting, processes: int) -> Reader:
    return reader_for(
        setting.data.train,
        setting.data.input,
        setting.placement,
        setting.augment,
        seed=setting.seed,
        processes=processes,
        skip_corrupt=setting.skip_corrupt,
    )


def measure_stages(setting: Setting, length: StageLength) -> Iterator[Figure]:
    """Measure each stage alone, with one thread."""
    with one_thread():
        for stage in stages_of(setting):
            try:
                yield Figure(stage.name, stage.about, repeat(stage.work, length.repeats, length.seconds))
            finally:
                stage.close()


def measure_pipeline(
    setting: Setting, processes: Sequence[int], image_bytes: float, length: StageLength
) -> Iterator[tuple[int, Figure]]:
    """Measure the pipeline for each number of loader processes; images in memory use none and are measured once."""
    for number in [0] if isinstance(setting.data.train, MemorySplit) else processes:
        order = orders(len(setting.data.train), setting.batch, setting.seed)
        passes = ([next(order) for _ in range(ceil(PLAN_IMAGES / setting.batch))] for _ in count())
        with closing(_reader(setting, number)) as reader:
            batches = chain.from_iterable(reader.read(plan, epoch) for epoch, plan in enumerate(passes))
            for _ in range(max(1, number)):
                next(batches)
            turns, counter = [], ReadCounter()
            for _ in range(length.repeats):
                start, images = time.perf_counter(), 0
                while time.perf_counter() - start < length.seconds or not images:
                    images += len(next(batches).labels)
                accelerator.synchronize(setting.placement.device)
                elapsed = time.perf_counter() - start
                turns.append(ComparisonTurn(elapsed, images, round(images * image_bytes), *counter.take()))
        yield number, Figure("pipeline", count_processes(number), turns)


def image_bytes(stages: Sequence[Figure]) -> float:
    """Return the mean size of an image at the first stage, which is the file size for image files."""
    turns = stages[0].turns
    return sum(turn.size_bytes for turn in turns) / sum(turn.images for turn in turns)


def describe_storage(stages: Sequence[Figure]) -> list[str]:
    """Describe how much was read from storage instead of the page cache, in at most one line."""
    read = next((stage for stage in stages if stage.name == "read"), None)
    if read is None or any(turn.storage_bytes is None for turn in read.turns):
        return []
    share = sum(turn.storage_bytes or 0 for turn in read.turns) / sum(turn.size_bytes for turn in read.turns)
    return [f"{100 * min(1.0, share):.0f} % of the bytes read came from storage, the rest from the page cache"]


def measure_demand(setting: Setting, arch: str, precision_name: str, length: StageLength) -> Figure:
    """Measure a model's demand: forward, backward and optimizer step on a batch in the device's memory.

    Raises:
        ConfigError: The model is unknown or does not accept these images, or the precision needs a GPU.
    """
    spec, place = setting.data.input, setting.placement
    precision = build_precision(NumericsConfig(precision=precision_name), place.device)  # type: ignore[arg-type]
    model = registry.build(arch, len(setting.data.classes), spec.channels, min(spec.height, spec.width))
    check_model(f"--arch {arch}", model, setting.data)
    model = precision.prepare(model).to(place.device).train()
    optimizer = torch.optim.SGD(precision.weights_of(model).parameters(), lr=1e-6, momentum=0.9)
    shape = (setting.batch, spec.channels, spec.height, spec.width)
    images = torch.zeros(shape, dtype=precision.input_dtype, device=place.device)
    labels = torch.from_numpy(np.arange(setting.batch) % len(setting.data.classes)).to(place.device)

    def step() -> tuple[int, int]:
        with precision.autocast():
            loss = F.cross_entropy(model(images).to(precision.loss_dtype), labels)
        precision.backward(loss)
        precision.unscale(optimizer)
        precision.step(optimizer)
        model.zero_grad()
        accelerator.synchronize(place.device)
        return len(images), images.nbytes

    return Figure(
        "demand", f"{arch}, {precision.name}: forward, backward and step", repeat(step, length.repeats, length.seconds)
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, as in a loader process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
