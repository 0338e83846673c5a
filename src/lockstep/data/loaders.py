"""Loaders yield batches: a reader makes them, and a sharding selects the samples of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from lockstep.config.schema import AugmentConfig
from lockstep.data.random_draws import Indices
from lockstep.data.readers import MemoryReader, Placement, Reader
from lockstep.data.sets import Batch, EncodedSplit, InputSpec, MemorySplit, Split
from lockstep.data.sharding import Sharding, evaluation_batches, permutation
from lockstep.data.transforms import Mixing
from lockstep.errors import ConfigError
from lockstep.models.nested import leaves
from lockstep.world import accelerator

FILLER = np.zeros(1, np.int64)  # the samples of a worker without any in a step


def reader_for(
    split: Split,
    spec: InputSpec,
    placement: Placement,
    augment: AugmentConfig,
    *,
    seed: int = 0,
    processes: int = 0,
    skip_corrupt: bool = False,
    on_device: bool = False,
) -> Reader:
    """Return the reader for a split.

    Args:
        processes: Number of loader processes; ignored for images in memory.
        on_device: Whether to decode training images on the device.

    Raises:
        ConfigError: This kind of split does not support the augmentation.
    """
    if isinstance(split, MemorySplit):
        return MemoryReader(split, spec, placement, augment, seed)
    from lockstep.data.stream_reader import FileSource, StreamReader, UserSource  # with Pillow

    in_memory = [f"--{name}" for name in ("shift", "rotate", "zoom", "shear", "cutout") if getattr(augment, name)]
    if in_memory:
        raise ConfigError(f"{', '.join(in_memory)}: only available for images held in memory; see --in-memory")
    if isinstance(split, EncodedSplit):
        source = FileSource(split, spec, augment, seed)
        options = (spec, placement, processes, skip_corrupt, augment, seed)
        if not on_device:
            return StreamReader(source, *options)
        from lockstep.data.device_decode import DeviceDecoder, EncodedSource  # with torchvision's decoders

        finish = DeviceDecoder(placement.device, spec.channels, split)
        return StreamReader(EncodedSource(split, spec, source), *options, finish)
    given = [name for name in ("rand_augment", "trivial_augment", "random_erasing") if getattr(augment, name)]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags}: not available with a custom data set; augment the images in the data set")
    return StreamReader(UserSource(split, seed), spec, placement, processes, skip_corrupt)


def prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches; on a device with streams, copy the next one on a side stream while the current one is in use.

    Args:
        batches: For such a device, must create its tensors by non-blocking copies from pinned memory, on the current
            stream.
    """
    if not accelerator.overlaps(device):
        yield from batches
        return
    side = accelerator.new_stream(device)
    used_by = accelerator.current_stream(device)
    side.wait_stream(used_by)

    def make() -> Batch | None:
        with accelerator.on(side):
            return next(batches, None)

    coming = make()
    while coming is not None:
        used_by.wait_stream(side)
        for tensor in leaves(coming):
            if tensor is not None:
                tensor.record_stream(used_by)  # the side stream must not reuse this memory too early
        ready, coming = coming, make()
        yield ready


class TrainLoader:
    """Batches of this worker's share of each training step."""

    def __init__(self, reader: Reader, sharding: Sharding, device: torch.device, mixing: Mixing | None = None):
        """`mixing` requires a `sharding` with `together=2`."""
        self.reader = reader
        self.sharding = sharding
        self._device = device
        self._mixing = mixing or Mixing(AugmentConfig())
        self._order = np.zeros(0, np.int64)  # of the current epoch
        self._start_step = self._delivered = 0
        self._plan: list[Indices] = []  # the samples of each step from `_start_step` on

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from `start_step` on.

        If this worker's share of the last step is empty, it gets one sample of weight 0, since it must take part in the
        step.
        """
        self._order = permutation(self.sharding.samples, self.sharding.seed, epoch)
        self._start_step, self._delivered = start_step, 0
        plan = self._plan = self._shares(start_step)
        read = zip(self.reader.read(plan, epoch), plan, strict=True)
        mixed = (self._mixing(batch, samples, epoch) for batch, samples in read)
        for batch in prefetch(mixed, self._device):
            samples = plan[self._delivered]
            self._delivered += 1
            yield batch if samples is not FILLER else batch._replace(weights=torch.zeros(1, device=self._device))

    def _shares(self, start_step: int) -> list[Indices]:
        sharding, order = self.sharding, self._order
        shares = (order[sharding.places(step)] for step in range(start_step, sharding.steps_per_epoch))
        return [samples if len(samples) else FILLER for samples in shares]

    def samples_of(self, step: int) -> Indices:
        """Return this worker's samples of a step of the current epoch."""
        samples = self._plan[step - self._start_step]
        return samples if samples is not FILLER else samples[:0]

    @property
    def prefetches(self) -> bool:
        """Whether batches are loaded while others are in use."""
        return self.reader.batches_ahead > 0

    @property
    def next_step(self) -> int:
        """The first step of the epoch whose samples are not being read yet."""
        return self._start_step + self._delivered + self.reader.batches_ahead + accelerator.overlaps(self._device)

    def recut(self, fractions: tuple[float, ...], first_step: int) -> None:
        """Change the workers' shares from a step of the epoch on, on all workers; it must not be before `next_step`."""
        self.sharding = replace(self.sharding, fractions=fractions)
        self._plan[first_step - self._start_step :] = self._shares(first_step)


class EvalLoader:
    """Batches of this worker's part of an evaluation; all workers together see each sample once."""

    def __init__(self, reader: Reader, samples: int, batch: int, rank: int, size: int, device: torch.device):
        self.reader = reader
        self._plan = evaluation_batches(samples, batch, rank, size)
        self._device = device

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        return prefetch(self.reader.read(self._plan, None), self._device)
