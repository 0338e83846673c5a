"""Readers turn lists of sample numbers into batches on the device.

A reader gets a plan, the samples of each batch, and yields the batches in this order. It is independent of ranks;
`loaders.py` makes the plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.config.schema import AugmentConfig
from lockstep.data import transforms
from lockstep.data.random_draws import Draws, Indices
from lockstep.data.sets import Batch, InputSpec, MemorySplit
from lockstep.data.transforms import erase_
from lockstep.errors import ConfigError, LoaderError, first_line
from lockstep.world.accelerator import send


@dataclass(frozen=True)
class Placement:
    """Device, floating dtype and memory format (NCHW or NHWC) of batches, and floating dtype of targets."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    loss_dtype: torch.dtype = torch.float32


class Reader(Protocol):
    """`read` yields one batch per entry of a plan; `epoch` None means evaluation, without augmentation.

    It reads up to `batches_ahead` entries more than it has yielded batches; later ones may still change.
    """

    left_out: set[str]
    batches_ahead: int

    def read(self, plan: Sequence[Indices], epoch: int | None) -> Iterator[Batch]: ...

    def close(self) -> None:
        """Stop the reader's processes, if any."""


def scale_and_shift(spec: InputSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and shift, float64 [1, C, 1, 1]; pixels (0 to 255) times scale plus shift are normalized."""
    mean, std = (
        torch.tensor(values, dtype=torch.float64, device="cpu").view(1, -1, 1, 1) for values in (spec.mean, spec.std)
    )
    return 1 / (255 * std), -mean / std


class Normalizer:
    """Normalizes uint8 pixels on their device."""

    def __init__(self, spec: InputSpec, placement: Placement):
        self._placement = placement
        self._scale, self._shift = (part.to(placement.device, placement.dtype) for part in scale_and_shift(spec))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalize pixels (0 to 255), uint8 or floating [N, C, H, W]; the result has the same shape."""
        # On a CPU, arithmetic by channel is several times as slow in NHWC, so the format is converted last.
        last = self._placement.memory_format
        first = torch.contiguous_format if pixels.device.type == "cpu" else last
        images = pixels.to(self._placement.dtype, memory_format=first, copy=True)
        return images.mul_(self._scale).add_(self._shift).contiguous(memory_format=last)


def change_at_random(pixels: torch.Tensor, draws: Draws, config: AugmentConfig) -> torch.Tensor:
    """Apply RandAugment or TrivialAugment, if configured, to uint8 [N, C, H, W] in place."""
    if config.trivial_augment:
        from lockstep.data.auto_augment import trivial_augment_  # with torchvision's transforms

        return trivial_augment_(pixels, draws)
    if not config.rand_augment:
        return pixels
    from lockstep.data.auto_augment import rand_augment_  # with torchvision's transforms

    return rand_augment_(pixels, draws, config.rand_augment, config.rand_augment_magnitude)


class MemoryReader:
    """Reads batches from images in device memory, with the augmentation of `lockstep train`; also for your own loop.

    Args:
        config, seed: Of the augmentation, as in a recipe.
    """

    batches_ahead = 0

    def __init__(
        self, split: MemorySplit, spec: InputSpec, placement: Placement, config: AugmentConfig, seed: int
    ) -> None:
        if config.shift_padding == "reflect" and config.shift >= min(spec.height, spec.width):
            raise ConfigError(
                f"--shift {config.shift}: with --shift-padding reflect, must be less than the shorter image side, "
                f"{min(spec.height, spec.width)}"
            )
        self._images = split.images.to(placement.device)
        self._labels = split.labels.to(placement.device)
        self._normalize = Normalizer(spec, placement)
        self._dtype = placement.dtype
        self._config = config
        self._seed = seed
        self.left_out: set[str] = set()

    def read(self, plan: Sequence[Indices], epoch: int | None) -> Iterator[Batch]:
        return (self.batch(samples, epoch) for samples in plan)

    def batch(self, samples: Indices, epoch: int | None) -> Batch:
        """Return a batch of the samples with these numbers, int64 [N], as an epoch augments them; None: as they are."""
        labels = self._labels.index_select(0, send(samples, self._labels.device))
        draws = Draws(self._seed, epoch or 0, samples)
        config = AugmentConfig() if epoch is None else self._config
        return Batch(self._images_of(draws, config), labels)

    def _images_of(self, draws: Draws, config: AugmentConfig) -> torch.Tensor:
        pixels = change_at_random(transforms.gather(self._images, draws, config), draws, config)
        if transforms.warps(config):
            pixels = transforms.warp(pixels.to(self._dtype), draws, config)
        images = self._normalize(pixels)
        images = transforms.cutout_(images, draws, config.cutout) if config.cutout else images
        return erase_(images, draws, config.random_erasing) if config.random_erasing else images

    def close(self) -> None:
        pass


@contextmanager
def lost_loaders_named() -> Iterator[None]:
    """Raise LoaderError for torch's error about a loader process that exited.

    torch raises it in a signal handler, so it may occur anywhere in the main thread.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(("DataLoader worker", "Pin memory thread")):
            raise
        raise loader_error(error) from error


def loader_error(error: Exception) -> LoaderError:
    """Return the LoaderError for torch's error."""
    return LoaderError(
        f"a loader process exited ({first_line(error).strip()}); if memory or /dev/shm ran out, lower --workers or "
        f"--batch-size"
    )
