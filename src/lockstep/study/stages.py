"""The stages of loading an image, each measured alone on one core or on the device.

Files are read, decoded (including crop, resize and mirroring, which are one operation), sent by the loader process,
copied to the device and normalized there, and augmented there. Decoding is measured on files in memory, so that it
does not include reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat

import numpy as np
import torch
from torch.utils.data import DataLoader

from lockstep.config.schema import AugmentConfig
from lockstep.data import transforms
from lockstep.data.decode import unless_skipped
from lockstep.data.loader_processes import as_it_is
from lockstep.data.random_draws import Draws, Indices
from lockstep.data.readers import Normalizer, Placement, change_at_random
from lockstep.data.sets import Batch, EncodedSplit, ImageData, MemorySplit, UserSplit
from lockstep.data.stream_reader import BatchRequest, FileSource, RawImages, SharedRing, Source, UserSource, share
from lockstep.data.transforms import Mixing, erase_, mixes
from lockstep.errors import CorruptImageError
from lockstep.world import accelerator

IN_MEMORY = 256  # number of files that are held in memory to measure decoding
Work = Callable[[], tuple[int, int]]  # processes one batch; returns its number of images and bytes


@dataclass(frozen=True)
class Stage:
    """One stage. Bytes are file sizes for stages up to decoding, and pixel sizes for later stages."""

    name: str
    about: str
    work: Work
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Setting:
    """The data to load and how to load it."""

    data: ImageData
    augment: AugmentConfig
    batch: int
    placement: Placement
    seed: int = 0
    skip_corrupt: bool = False


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


def stages_of(setting: Setting) -> Iterator[Stage]:
    """Yield the stages for the training set's kind, in the order of processing."""
    split = setting.data.train
    if isinstance(split, MemorySplit):
        yield Stage("pick", "a batch from memory, shifted and mirrored", _pick(setting, split))
        picked = _pick_batch(setting, split, next(orders(len(split), setting.batch, setting.seed)))
        yield from _on_device(setting, picked)
        return
    if isinstance(split, EncodedSplit):
        yield Stage("read", "files, without decoding", _read(setting, split))
        held = MemoryFiles(split, next(orders(len(split), min(IN_MEMORY, len(split)), setting.seed + 1)))
        source: Source = FileSource(held, setting.data.input, setting.augment, setting.seed)
        samples = len(held)
        yield Stage("decode", "from memory, with crop, resize and mirroring", _make(setting, source, samples, held))
    else:
        source, samples = UserSource(split, setting.seed), len(split)
        yield Stage("items", "items of your data set, stacked", _make(setting, source, samples))
    raw = source.__getitems__(BatchRequest(0, next(orders(samples, setting.batch, setting.seed))))
    is_users = isinstance(split, UserSplit)
    yield _hand_over(setting, raw, is_users)
    yield from _on_device(setting, raw.images, is_users)


def orders(samples: int, batch: int, seed: int) -> Iterator[Indices]:
    """Yield endless batches of sample indices; each pass over all samples is in a new random order."""
    generator, left = np.random.default_rng(seed), np.empty(0, np.int64)
    while True:
        while len(left) < batch:
            left = np.concatenate([left, generator.permutation(samples)])
        yield left[:batch]
        left = left[batch:]


def _read(setting: Setting, split: EncodedSplit) -> Work:
    batches = orders(len(split), setting.batch, setting.seed)

    def work() -> tuple[int, int]:
        samples = next(batches)
        try:
            # Copy, because a memory map is read only on access.
            return len(samples), sum(len(bytes(split.read(int(sample)))) for sample in samples)
        except OSError as error:
            raise CorruptImageError(f"cannot read an image: {error}") from None

    return work


def _make(setting: Setting, source: Source, samples: int, files: MemoryFiles | None = None) -> Work:
    """Return work that loads batches in this process; it counts the bytes of `files` or, if None, of the pixels."""
    batches, epochs = orders(samples, setting.batch, setting.seed), count()

    def work() -> tuple[int, int]:
        chosen = next(batches)
        raw = source.__getitems__(BatchRequest(next(epochs), chosen))
        if raw.corrupt and not setting.skip_corrupt:
            raise unless_skipped(next(iter(raw.corrupt.values()))[1])
        size = sum(len(files.read(int(sample))) for sample in chosen) if files else raw.images.nbytes
        return len(chosen) - len(raw.corrupt), size

    return work


class _Ready:
    """A source of ready-made batches. As in loading, buffers are reused for files and new for custom data sets."""

    def __init__(self, raw: RawImages, is_users: bool):
        self._raw, self._is_users = raw, is_users
        self._buffers = SharedRing()

    def __getitems__(self, samples: Sequence[int]) -> RawImages:
        images = self._raw.images
        if self._is_users:
            return self._raw._replace(images=share(torch.empty_like(images)))
        count, channels, height, width = images.shape
        return self._raw._replace(images=self._buffers.take((count, height, width, channels)).permute(0, 3, 1, 2))


def _hand_over(setting: Setting, raw: RawImages, is_users: bool) -> Stage:
    """Return the transfer stage: a loader process only sends ready-made batches to the worker."""
    loader: DataLoader[RawImages] = DataLoader(
        _Ready(raw, is_users),  # type: ignore[arg-type]  # as for StreamReader
        batch_sampler=repeat([]),
        num_workers=1,
        collate_fn=as_it_is,
        pin_memory=accelerator.overlaps(setting.placement.device),
    )
    batches = iter(loader)

    def work() -> tuple[int, int]:
        images = next(batches).images
        return len(images), images.nbytes

    close = batches._shutdown_workers  # type: ignore[attr-defined]  # without this, it runs until garbage collection
    return Stage("collate", "a batch from a loader process to the worker", work, close)


def _pick_batch(setting: Setting, split: MemorySplit, samples: Indices) -> torch.Tensor:
    return transforms.gather(split.images, Draws(setting.seed, 0, samples), setting.augment)


def _pick(setting: Setting, split: MemorySplit) -> Work:
    batches = orders(len(split), setting.batch, setting.seed)
    held = MemorySplit(split.images.to(setting.placement.device), split.labels)

    def work() -> tuple[int, int]:
        pixels = _pick_batch(setting, held, next(batches))
        return len(pixels), pixels.nbytes

    return _finished(work, setting)


def _on_device(setting: Setting, images: torch.Tensor, is_users: bool = False) -> Iterator[Stage]:
    """Yield the stages on the device, for a batch of uint8 pixels or of a custom data set's values."""
    device, config = setting.placement.device, setting.augment
    normalize = Normalizer(setting.data.input, setting.placement)
    host = images.pin_memory() if accelerator.overlaps(device) else images

    def copy() -> tuple[int, int]:
        there = host.to(device, non_blocking=True)
        if there.dtype == torch.uint8:
            normalize(there)
        else:
            there.to(setting.placement.dtype, memory_format=setting.placement.memory_format)
        return len(host), host.nbytes

    draws = Draws(setting.seed, 0, np.arange(len(images)))
    pixels = images.to(device)
    mixing = Mixing(config, setting.seed)
    batch = Batch(pixels.to(setting.placement.dtype), torch.zeros(len(pixels), dtype=torch.int64, device=device))

    def change() -> tuple[int, int]:
        if not is_users:
            changed = change_at_random(pixels, draws, config)
            if transforms.warps(config):
                transforms.warp(changed.to(setting.placement.dtype), draws, config)
            if config.cutout:
                transforms.cutout_(batch.images, draws, config.cutout)
            if config.random_erasing:
                erase_(batch.images, draws, config.random_erasing)
        mixing(batch, draws.samples, 0)
        return len(pixels), pixels.nbytes

    named = ("rand_augment", "trivial_augment", "cutout", "random_erasing")
    own = [name for name in named if getattr(config, name)] + ["warp"] * transforms.warps(config)
    names = [*([] if is_users else own), *(["mixing"] if mixes(config) else [])]
    if names:
        yield Stage("augment", ", ".join(names).replace("_", "-"), _finished(change, setting))
    yield Stage("copy", f"to {device.type}, normalized", _finished(copy, setting))


def _finished(work: Work, setting: Setting) -> Work:
    """Return work that also waits for the device to finish."""
    if setting.placement.device.type == "cpu":
        return work

    def wait() -> tuple[int, int]:
        done = work()
        accelerator.synchronize()
        return done

    return wait
