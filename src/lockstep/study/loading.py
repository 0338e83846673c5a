"""How fast training images can be loaded, against what a model takes: each stage alone, then the whole pipeline."""

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
from lockstep.data.pipeline.readers import Reader
from lockstep.data.sets import MemorySplit
from lockstep.models import registry
from lockstep.study.figures import Figure, ReadCounter, Turn, repeat
from lockstep.study.stages import Setting, orders, stages_of
from lockstep.train.monitoring.loader_tuning import count_processes, show_rate, smallest_of_best
from lockstep.train.precision import build_precision
from lockstep.world import accelerator

PLAN_IMAGES = 1 << 14
REMEDIES = {
    "read": "the set packed into large files (`lockstep data pack`), or a faster disk",
    "decode": "more cores for each worker, a smaller --image-size, or smaller files (`lockstep data pack`)",
    "items": "cheaper items of your data set, or more cores for each worker",
    "collate": "a smaller --image-size, or more loader processes",
    "augment": "less of the augmentation named there",
    "copy": "a smaller --image-size, or a larger -b",
    "pick": "a larger -b",
}


LITTLE = 0.05  # a share of waiting that is no reason for more loader processes


def wait_share(processes: int, rate: float, need: float) -> float:
    """The share of its time that a model which takes `need` images a second waits for a pipeline that makes `rate`.

    Loader processes work while the model computes; without them (0) each batch is made in between.
    """
    return need / (need + rate) if processes == 0 else max(0.0, 1 - rate / need)


@dataclass(frozen=True)
class StageLength:
    """How long each thing is measured: `repeats` times `seconds`, after a warm-up."""

    repeats: int
    seconds: float


@dataclass(frozen=True)
class LoadingStudy:
    """What was measured: stages on one core each, the pipeline by its loader processes, and what the model takes."""

    stages: Sequence[Figure]
    pipeline: dict[int, Figure]
    demand: Figure | None

    @property
    def limit(self) -> Figure:
        """The slowest stage."""
        return min(self.stages, key=lambda stage: stage.images_per_second.median)

    def verdict(self) -> list[str]:
        """What it comes to, in a few lines for people."""
        rates = {processes: figure.images_per_second.median for processes, figure in self.pipeline.items()}
        number = smallest_of_best(rates)
        best, limit = rates[number], self.limit
        lines = [
            f"the slowest stage is {limit.name}: {_rate(limit.images_per_second.median)} on one core",
            f"the pipeline's best is {_rate(best)}, with {count_processes(number)}",
        ]
        if self.demand is None:
            return [*lines, "add -a ARCH to compare that with what a model takes"]
        need = self.demand.images_per_second.median
        waits = {processes: wait_share(processes, rate, need) for processes, rate in sorted(rates.items())}
        enough = next((processes for processes, wait in waits.items() if wait <= LITTLE), None)
        if enough is not None:
            return [*lines, f"the model takes {_rate(need)}: {_enough(enough)}"]
        least = min(waits, key=lambda processes: waits[processes])
        lines.append(
            f"the model takes {_rate(need)}: none of these is enough; with {count_processes(least)} it would wait "
            f"{100 * waits[least]:.0f} % of its time"
        )
        if len(rates) > 1 and number == max(rates):  # the rate still grew
            lines.append(f"if it goes on to grow, {_enough(ceil(need / best * number))}")
        return [*lines, f"what helps: {REMEDIES[limit.name]}"]

    def to_mapping(self) -> dict[str, Any]:
        return {
            "kind": "loading",
            "units": "images, bytes and read operations a second: lower quartile, median, upper quartile",
            "stages": [stage.to_mapping() for stage in self.stages],
            "pipeline": [{"processes": number, **figure.to_mapping()} for number, figure in self.pipeline.items()],
            "demand": self.demand.to_mapping() if self.demand else None,
            "limit": self.limit.name,
            "verdict": self.verdict(),
        }


def check(setting: Setting) -> None:
    """Refuse what such images cannot have, before anything is measured.

    Raises:
        ConfigError: Augmentation that is for other kinds of data sets.
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
    """Each stage alone, with one thread."""
    with one_thread():
        for stage in stages_of(setting):
            try:
                yield Figure(stage.name, stage.about, repeat(stage.work, length.repeats, length.seconds))
            finally:
                stage.close()


def measure_pipeline(
    setting: Setting, processes: Sequence[int], image_bytes: float, length: StageLength
) -> Iterator[tuple[int, Figure]]:
    """The whole, by the number of loader processes; images in memory need none, so those are measured once."""
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
                turns.append(Turn(elapsed, images, round(images * image_bytes), *counter.take()))
        yield number, Figure("pipeline", count_processes(number), turns)


def image_bytes(stages: Sequence[Figure]) -> float:
    """The mean size of an image at the first stage: of its file, if it has one."""
    turns = stages[0].turns
    return sum(turn.size_bytes for turn in turns) / sum(turn.images for turn in turns)


def describe_storage(stages: Sequence[Figure]) -> list[str]:
    """Whether reading met storage or what was in memory already, in a line for people."""
    read = next((stage for stage in stages if stage.name == "read"), None)
    if read is None or any(turn.storage_bytes is None for turn in read.turns):
        return []
    share = sum(turn.storage_bytes or 0 for turn in read.turns) / sum(turn.size_bytes for turn in read.turns)
    return [
        f"by the system's count, {100 * min(1.0, share):.0f} % of what was read came from storage, the rest was cached"
    ]


def measure_demand(setting: Setting, arch: str, precision_name: str, length: StageLength) -> Figure:
    """What a model takes: forward, backward and the optimizer's step, of one batch that is there.

    Raises:
        ConfigError: There is no such model, it cannot take these images, or the precision needs a GPU.
    """
    spec, place = setting.data.input, setting.placement
    precision = build_precision(NumericsConfig(precision=precision_name), place.device.type)  # type: ignore[arg-type]
    model = registry.build(arch, len(setting.data.classes), spec.channels, min(spec.height, spec.width))
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
    """Let torch compute on one core, as it does in a loader process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _enough(number: int) -> str:
    return f"{count_processes(number)} a worker {'is' if number == 1 else 'are'} enough"


def _rate(images_per_second: float) -> str:
    return f"{show_rate(images_per_second)} images/s"
