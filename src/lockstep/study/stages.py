"""Measure the rates of data loading: stages alone, the whole pipeline, and the demand of a model.

Stages are measured on one core: `read` reads files, `decode` decodes files in memory (with crop, resize and mirroring,
which are one operation), and `augment` copies pixels to the device, normalizes and augments them there. A custom data
set has `items` instead of the first two. Images in memory have no stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, repeat
from math import ceil

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.config.schema import AugmentConfig, NumericsConfig
from lockstep.data.decode import unless_skipped
from lockstep.data.loaders import reader_for
from lockstep.data.random_draws import Indices
from lockstep.data.readers import Placement, Reader
from lockstep.data.sets import EncodedSplit, ImageData, MemorySplit, UserSplit
from lockstep.data.stream_reader import BatchRequest, FileSource, RawImages, Source, StreamReader, UserSource
from lockstep.errors import CorruptImageError
from lockstep.models import registry
from lockstep.study.figures import Figure, Work, measure
from lockstep.train.guards.checks import check_model
from lockstep.train.monitoring.data_wait import count_processes
from lockstep.train.precision import build_precision
from lockstep.world import accelerator

PLAN_IMAGES = 1 << 14
HELD_FILES = 256  # held in memory to measure decoding


@dataclass(frozen=True)
class Setting:
    """The data to load and how to load it; each rate is measured `repeats` times for `seconds`."""

    data: ImageData
    augment: AugmentConfig
    batch: int
    placement: Placement
    skip_corrupt: bool = False
    seconds: float = 0.5
    repeats: int = 5

    def reader(self, processes: int) -> Reader:
        """Return the reader of `lockstep train`.

        Raises:
            ConfigError: The augmentation is not available for this kind of data set.
        """
        data, more = self.data, {"processes": processes, "skip_corrupt": self.skip_corrupt}
        return reader_for(data.train, data.input, self.placement, self.augment, **more)  # type: ignore[arg-type]

    def measure(self, name: str, about: str, work: Work) -> Figure:
        wait = partial(accelerator.synchronize, self.placement.device)
        return Figure(name, about, measure(work, self.repeats, self.seconds, wait))


def measure_stages(setting: Setting) -> Iterator[Figure]:
    """Measure each stage alone, with one thread."""
    split, spec = setting.data.train, setting.data.input
    if isinstance(split, MemorySplit):
        return
    with one_thread():
        if isinstance(split, EncodedSplit):
            yield setting.measure("read", "files on one core, without decoding", _read(setting, split))
            held = MemoryFiles(split, next(orders(len(split), min(HELD_FILES, len(split)))))
            source: Source = FileSource(held, spec, setting.augment, seed=0)
            about = "files in memory on one core, with crop, resize and mirroring"
            yield setting.measure("decode", about, _make(setting, source, len(held)))
        else:
            assert isinstance(split, UserSplit)
            source = UserSource(split, seed=0)
            yield setting.measure(
                "items", "batches of your data set's items on one core", _make(setting, source, len(split))
            )
        samples = np.arange(min(setting.batch, HELD_FILES, len(split)))
        ready = _Ready(source.__getitems__(BatchRequest(0, samples)))
        about = f"copied to {setting.placement.device.type}, normalized and augmented"
        with closing(StreamReader(ready, spec, setting.placement, 0, True, setting.augment)) as reader:
            yield setting.measure("augment", about, _batches(reader, repeat(samples), setting.batch))


def measure_pipeline(setting: Setting, processes: Iterable[int]) -> Iterator[tuple[int, Figure]]:
    """Measure the pipeline for each number of loader processes; images in memory use none and are measured once."""
    for number in [0] if isinstance(setting.data.train, MemorySplit) else processes:
        with closing(setting.reader(number)) as reader:
            work = _batches(reader, orders(len(setting.data.train), setting.batch), setting.batch)
            for _ in range(number):  # until each process has delivered a batch
                work()
            yield number, setting.measure("pipeline", count_processes(number), work)


def _batches(reader: Reader, order: Iterator[Indices], batch: int) -> Work:
    """Return work that takes the next batch of endless epochs."""
    passes = ([next(order) for _ in range(ceil(PLAN_IMAGES / batch))] for _ in count())
    batches = chain.from_iterable(reader.read(plan, epoch) for epoch, plan in enumerate(passes))
    return lambda: (len(next(batches).labels), 0)


class MemoryFiles(EncodedSplit):
    """Encoded files of some samples of a split, held in memory."""

    def __init__(self, split: EncodedSplit, samples: Indices):
        self._names = [split.name(int(sample)) for sample in samples]
        self._contents = [bytes(split.read(int(sample))) for sample in samples]
        self.labels = [split.labels[int(sample)] for sample in samples]

    def name(self, sample: int) -> str:
        return self._names[sample]

    def read(self, sample: int) -> bytes:
        return self._contents[sample]


class _Ready:
    """A source that has a batch already."""

    def __init__(self, raw: RawImages):
        self._raw = raw

    def __getitems__(self, request: BatchRequest) -> RawImages:
        return self._raw


def orders(samples: int, batch: int) -> Iterator[Indices]:
    """Yield endless batches of sample indices; each pass over all samples is in a new random order."""
    generator, left = np.random.default_rng(0), np.empty(0, np.int64)
    while True:
        while len(left) < batch:
            left = np.concatenate([left, generator.permutation(samples)])
        yield left[:batch]
        left = left[batch:]


def _read(setting: Setting, split: EncodedSplit) -> Work:
    batches = orders(len(split), setting.batch)

    def work() -> tuple[int, int]:
        samples = next(batches)
        try:
            # Copy, because a memory map is read only on access.
            return len(samples), sum(len(bytes(split.read(int(sample)))) for sample in samples)
        except OSError as error:
            raise CorruptImageError(f"cannot read an image: {error}") from None

    return work


def _make(setting: Setting, source: Source, samples: int) -> Work:
    batches, epochs = orders(samples, setting.batch), count()

    def work() -> tuple[int, int]:
        raw = source.__getitems__(BatchRequest(next(epochs), next(batches)))
        if raw.corrupt and not setting.skip_corrupt:
            raise unless_skipped(next(iter(raw.corrupt.values()))[1])
        return len(raw.labels) - len(raw.corrupt), 0

    return work


def measure_demand(setting: Setting, arch: str, precision_name: str) -> Figure:
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
        return len(images), 0

    return setting.measure("demand", f"{arch}, {precision.name}: forward, backward and step", step)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, as in a loader process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
