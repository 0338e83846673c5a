"""Loaders: what a training loop iterates over. Each is a reader (how batches are made) with a sharding (which samples).

People with a loop of their own use `loaders`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data import catalog
from lockstep.data.augment.mixing import Mixing, mixes
from lockstep.data.augment.progressive import Sizes
from lockstep.data.batch import Batch
from lockstep.data.pipeline.prefetch import prefetch
from lockstep.data.pipeline.readers import MemoryReader, Placement, Reader
from lockstep.data.sets import EncodedSplit, InputSpec, MemorySplit, Split
from lockstep.data.sharding import Sharding, evaluation_batches
from lockstep.data.sources.user_dataset import describe
from lockstep.errors import ConfigError


def reader_for(
    split: Split,
    spec: InputSpec,
    placement: Placement,
    augment: AugmentConfig,
    *,
    seed: int = 0,
    processes: int = 0,
    skip_corrupt: bool = False,
    sizes: Sizes | None = None,
    on_device: bool = False,
) -> Reader:
    """The reader for a kind of split.

    Args:
        processes: Loader processes, which images in memory do not need.
        sizes: Sides of the training images by epoch; None: as `spec` has them.
        on_device: Decode training images on the device.

    Raises:
        ConfigError: Augmentation or sizes that this kind of split cannot have.
    """
    if isinstance(split, MemorySplit):
        return MemoryReader(split, spec, placement, augment, seed, sizes)
    from lockstep.data.pipeline.loader_processes import FileSource, StreamReader, UserSource  # with Pillow

    _check_augmentation(augment)
    if isinstance(split, EncodedSplit):
        source = FileSource(split, spec, augment, seed, sizes)
        options = (spec, placement, processes, skip_corrupt, augment, seed)
        if not on_device:
            return StreamReader(source, *options)
        from lockstep.data.pipeline.device_decode import DeviceDecoder, EncodedSource  # with torchvision's decoders

        finish = DeviceDecoder(placement.device, spec.channels, split)
        return StreamReader(EncodedSource(split, spec.channels, source), *options, finish)
    if sizes:
        raise ConfigError(
            "--progressive-sizes: not available with a custom data set; resize the images in the data set"
        )
    asked = [name for name in ("rand_augment", "trivial_augment", "random_erasing") if getattr(augment, name)]
    if asked:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise ConfigError(f"{flags}: not available with a custom data set; augment the images in the data set")
    return StreamReader(UserSource(split, seed), spec, placement, processes, skip_corrupt)


def _check_augmentation(augment: AugmentConfig) -> None:
    """Refuse augmentation that images which are not in memory cannot have, rather than leave it out without a word."""
    fields = ("shift", "rotate", "zoom", "shear", "cutout")
    asked = [f"--{field}" for field in fields if getattr(augment, field)]
    if asked:
        raise ConfigError(f"{', '.join(asked)}: only available for images held in memory; see --in-memory")


class TrainLoader:
    """This worker's share of each step of an epoch."""

    def __init__(self, reader: Reader, sharding: Sharding, device: torch.device, mixing: Mixing | None = None):
        """`mixing` needs a `sharding` that keeps pairs together."""
        self.reader = reader
        self.sharding = sharding
        self._device = device
        self._mixing = mixing or Mixing(AugmentConfig())

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Batches of the steps from `start_step` on.

        A worker whose share of the last step is empty gets one sample of weight 0: it has to take the step too.
        """
        shares = self.sharding.epoch(epoch, start_step)
        filler = np.zeros(1, np.int64)
        plan = [samples if len(samples) else filler for samples in shares]
        read = zip(self.reader.read(plan, epoch), plan, strict=True)
        mixed = (self._mixing(batch, samples, epoch) for batch, samples in read)
        batches = prefetch(mixed, self._device, self.reader.any_thread)
        for samples, batch in zip(shares, batches, strict=True):
            yield batch if len(samples) else batch._replace(weights=batch.images.new_zeros(1))


class EvalLoader:
    """This worker's part of an evaluation: over all workers each sample once."""

    def __init__(self, reader: Reader, samples: int, batch: int, rank: int, size: int, device: torch.device):
        self.reader = reader
        self._plan = evaluation_batches(samples, batch, rank, size)
        self._device = device

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        return prefetch(self.reader.read(self._plan, None), self._device, self.reader.any_thread)


class TrainBatches:
    """A `TrainLoader` as a plain iterable of (images, labels) for loops outside Lockstep."""

    def __init__(self, loader: TrainLoader):
        self._loader = loader
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order and augmentation of the next pass; without it, each pass takes the next epoch's."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._loader.sharding.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for batch in self._loader.epoch(epoch):
            yield batch.images, batch.labels


class EvalBatches:
    """An `EvalLoader` as a plain iterable of (images, labels)."""

    def __init__(self, loader: EvalLoader):
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self._loader:
            yield batch.images, batch.labels


def loaders(
    data: str | tuple[Any, Any],
    batch_size: int,
    rank: int = 0,
    size: int = 1,
    *,
    data_dir: str | Path = "data",
    download: bool = False,
    augment: AugmentConfig | None = None,
    device: str | torch.device = "cpu",
    workers: int = 0,
    seed: int = 0,
) -> tuple[TrainBatches, EvalBatches]:
    """Training and test loaders of one worker's share, for a training loop of your own.

    Args:
        data: A data set's name, a folder, or (training set, test set), map-style, of (image tensor [C, H, W], label).
        batch_size: Samples of one worker in one step; a step has `batch_size * size` over all workers. The epoch's
            last, smaller batch is dropped, so that all workers' batches are equal and plain averages are exact.
        rank: This worker's number.
        size: The number of workers.
        data_dir: Where named data sets are kept.
        download: Fetch a named data set that is not there.
        augment: Random changes to the training images, such as `AugmentConfig(shift=4, flip=True)`; None: none.
        device: Where batches are put.
        workers: Loader processes, for data that is not held in memory.
        seed: Decides the order of samples and the augmentation.

    Returns:
        Two iterables of (images, floating [N, C, H, W], normalised; labels, int64 [N]) on `device`. The training
        loader shuffles by (seed, epoch) and has `set_epoch`; over all workers the test loader gives each sample once.

    Raises:
        ConfigError: The training set is smaller than one step, or `augment` asks for mixup or cutmix.
        DataError: The data set is unknown, missing or malformed.
    """
    if augment and mixes(augment):
        raise ConfigError(
            "mixup and cutmix: loaders() yields one label per image; mix in the training loop, or use lockstep.train"
        )
    if isinstance(data, str):
        content = catalog.load(DataConfig(dataset=data, data_dir=Path(data_dir)), download)
    else:
        content = describe("data", *data)
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank}: must be between 0 and {size - 1} with {size} workers")
    if len(content.train) < batch_size * size:
        raise ConfigError(
            f"batch_size {batch_size} on {size} workers exceeds the {len(content.train)} training samples; lower it"
        )
    placement = Placement(torch.device(device))
    spec, augmentation = content.input, augment or AugmentConfig()
    train, test = (
        reader_for(split, spec, placement, augmentation, seed=seed, processes=workers)
        for split in (content.train, content.val)
    )
    sharding = Sharding(len(content.train), batch_size * size, rank, size, seed, drop_last=True)
    return (
        TrainBatches(TrainLoader(train, sharding, placement.device)),
        EvalBatches(EvalLoader(test, len(content.val), batch_size, rank, size, placement.device)),
    )
