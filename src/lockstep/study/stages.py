"""Measure the rates of data loading: stages alone, the whole pipeline, and the demand of a model.

Stages are measured on one core: `read` reads files, `decode` decodes files in the page cache (with crop, resize and
mirroring, which are one operation), and `augment` copies pixels to the device, normalizes and augments them there. A
custom data set has `items` instead of the first two. Images in memory have no stages.
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

from lockstep.config.schema import TrainConfig
from lockstep.data.decode import unless_skipped
from lockstep.data.loaders import reader_for
from lockstep.data.random_draws import Indices
from lockstep.data.readers import Placement, Reader
from lockstep.data.sets import EncodedSplit, ImageData, MemorySplit, UserSplit
from lockstep.data.stream_reader import BatchRequest, FileSource, RawImages, Source, StreamReader, UserSource
from lockstep.errors import CorruptImageError
from lockstep.study.loading import Figure, Work, measure
from lockstep.train.inputs import check_decoding
from lockstep.train.monitoring.data_wait import count_processes
from lockstep.train.network import build_model, place_model
from lockstep.train.precision import build_precision
from lockstep.world import accelerator
from lockstep.world.world import World

PLAN_IMAGES = 1 << 14
DECODED_FILES = 256  # few enough to be in the page cache


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
