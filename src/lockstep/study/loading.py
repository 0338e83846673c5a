"""The loading study: how fast training images load, by number of loader processes, beside a model's demand.

Stages are measured on one core: `read` reads files, `decode` decodes files in the page cache (with crop, resize and
mirroring, which are one operation), and `augment` copies pixels to the device, normalizes and augments them there. A
custom data set has `items` instead of the first two. Images in memory have no stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, repeat
from math import ceil
from statistics import quantiles
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.config.schema import TrainConfig
from lockstep.data.decode import unless_skipped
from lockstep.data.loaders import reader_for
from lockstep.data.random_draws import Indices
from lockstep.data.readers import Placement, Reader
from lockstep.data.sets import EncodedSplit, ImageData, MemorySplit, UserSplit
from lockstep.data.stream_reader import BatchRequest, FileSource, RawImages, Source, StreamReader, UserSource
from lockstep.errors import CorruptImageError
from lockstep.train.inputs import check_decoding, count_processes
from lockstep.train.network import build_model, place_model
from lockstep.train.precision import build_precision
from lockstep.world import accelerator
from lockstep.world.world import World

SUGGESTIONS = {
    "read": "pack the data set into large files (`lockstep data pack`), or use a faster disk",
    "decode": "use more cores per worker, a smaller --image-size, or smaller files (`lockstep data pack`)",
    "items": "make the items of your data set cheaper to load, or use more cores per worker",
    "augment": "use less augmentation, a smaller --image-size, or a larger -b",
}
LITTLE = 0.05  # share of time spent waiting for data that is acceptable
Work = Callable[[], int]  # processes a batch; returns the number of its images
REPEATS = 5
PLAN_IMAGES = 1 << 14
DECODED_FILES = 256  # few enough to be in the page cache


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


@dataclass(frozen=True)
class Setting:
    """The data to load and how to load it; each rate is measured several times for `seconds`."""

    config: TrainConfig
    data: ImageData
    world: World
    batch: int
    seconds: float = 0.5

    def reader(self, processes: int) -> Reader:
        """Return the reader of `lockstep train`.

        Raises:
            ConfigError: The augmentation or decoding is not available for this kind of data set.
        """
        config, data, device = self.config, self.data, self.world.device
        check_decoding(config, data, self.world)
        return reader_for(
            data.train,
            data.input,
            Placement(device),
            config.augment,
            processes=processes,
            skip_corrupt=config.data.skip_corrupt,
            on_device=config.data.decode == "gpu",
        )

    def measure(self, name: str, about: str, work: Work) -> Figure:
        return Figure(name, about, measure(work, self.seconds, partial(accelerator.synchronize, self.world.device)))


def measure_stages(setting: Setting) -> Iterator[Figure]:
    """Measure each stage alone, with one thread."""
    split, spec, augment, batch = setting.data.train, setting.data.input, setting.config.augment, setting.batch
    if isinstance(split, MemorySplit):
        return
    samples = np.random.default_rng(0).permutation(len(split))
    with one_thread():
        if isinstance(split, EncodedSplit):
            yield setting.measure("read", "files on one core, without decoding", _read(split, orders(samples, batch)))
            few = samples[:DECODED_FILES]
            _read(split, iter([few]))()
            source: Source = FileSource(split, spec, augment, seed=0)
            about = "files in the page cache on one core, with crop, resize and mirroring"
            yield setting.measure("decode", about, _make(setting, source, orders(few, batch)))
        else:
            assert isinstance(split, UserSplit)
            source, about = UserSource(split, seed=0), "batches of your data set's items on one core"
            yield setting.measure("items", about, _make(setting, source, orders(samples, batch)))
        few, device = samples[: min(batch, DECODED_FILES)], setting.world.device
        ready = _Ready(source.__getitems__(BatchRequest(0, few)))
        with closing(StreamReader(ready, spec, Placement(device), 0, True, augment)) as reader:
            about = f"copied to {device.type}, normalized and augmented"
            yield setting.measure("augment", about, _batches(reader, repeat(few), batch))


def measure_pipeline(setting: Setting, processes: Iterable[int]) -> Iterator[tuple[int, Figure]]:
    """Measure the pipeline for each number of loader processes; images in memory use none and are measured once."""
    samples = np.arange(len(setting.data.train))
    for number in [0] if isinstance(setting.data.train, MemorySplit) else processes:
        with closing(setting.reader(number)) as reader:
            work = _batches(reader, orders(samples, setting.batch), setting.batch)
            for _ in range(number):  # until each process has delivered a batch
                work()
            yield number, setting.measure("pipeline", count_processes(number), work)


def measure_demand(setting: Setting) -> Figure:
    """Measure the model's demand: forward, backward and optimizer step on a batch in the device's memory.

    Raises:
        ConfigError: The model is unknown or does not accept these images, or the precision needs a GPU.
    """
    config, spec, device = setting.config, setting.data.input, setting.world.device
    precision = build_precision(config.numerics, device)
    model = place_model(build_model(config, setting.data), config, precision, setting.world).train()
    optimizer = torch.optim.SGD(precision.weights_of(model).parameters(), lr=1e-6, momentum=0.9)
    shape = (setting.batch, spec.channels, spec.height, spec.width)
    images = torch.zeros(shape, dtype=precision.input_dtype, device=device)
    labels = torch.from_numpy(np.arange(setting.batch) % len(setting.data.classes)).to(device)

    def step() -> int:
        with precision.autocast():
            loss = F.cross_entropy(model(images).to(precision.loss_dtype), labels)
        precision.backward(loss)
        precision.unscale(optimizer)
        precision.step(optimizer)
        model.zero_grad()
        accelerator.synchronize(device)
        return len(images)

    return setting.measure("demand", f"{config.model.arch}, {precision.name}: forward, backward and step", step)


def orders(samples: Indices, batch: int) -> Iterator[Indices]:
    """Yield endless batches of samples; each pass over all samples is in a new random order."""
    generator, left = np.random.default_rng(0), np.empty(0, np.int64)
    while True:
        while len(left) < batch:
            left = np.concatenate([left, generator.permutation(samples)])
        yield left[:batch]
        left = left[batch:]


class _Ready:
    """A source that has a batch already."""

    def __init__(self, raw: RawImages):
        self._raw = raw

    def __getitems__(self, request: BatchRequest) -> RawImages:
        return self._raw


def _batches(reader: Reader, order: Iterator[Indices], batch: int) -> Work:
    """Return work that takes the next batch of endless epochs."""
    passes = ([next(order) for _ in range(ceil(PLAN_IMAGES / batch))] for _ in count())
    batches = chain.from_iterable(reader.read(plan, epoch) for epoch, plan in enumerate(passes))
    return lambda: len(next(batches).labels)


def _read(split: EncodedSplit, batches: Iterator[Indices]) -> Work:
    def work() -> int:
        samples = next(batches)
        try:
            for sample in samples:
                bytes(split.read(int(sample)))  # a memory map is read only when it is copied
        except OSError as error:
            raise CorruptImageError(f"cannot read an image: {error}") from None
        return len(samples)

    return work


def _make(setting: Setting, source: Source, batches: Iterator[Indices]) -> Work:
    epochs = count()

    def work() -> int:
        raw = source.__getitems__(BatchRequest(next(epochs), next(batches)))
        if raw.corrupt and not setting.config.data.skip_corrupt:
            raise unless_skipped(next(iter(raw.corrupt.values()))[1])
        return len(raw.labels) - len(raw.corrupt)

    return work


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, as in a loader process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
