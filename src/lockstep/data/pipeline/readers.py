"""Readers turn lists of sample numbers into batches on the device.

A reader gets a plan, the samples of each batch, and yields the batches in this order. It is independent of ranks;
`loaders.py` makes the plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lockstep.config.schema import AugmentConfig
from lockstep.data.augment import transforms
from lockstep.data.augment.random_draws import Draws, Indices
from lockstep.data.augment.transforms import Sizes, erase_, resize, side_at
from lockstep.data.pipeline.buffers import BufferPool
from lockstep.data.pipeline.prefetch import send
from lockstep.data.sets import Batch, InputSpec, MemorySplit
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """Device, floating dtype and memory format (NCHW or NHWC) of batches."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format


class Reader(Protocol):
    """`read` yields one batch per entry of a plan; `epoch` None means evaluation, without augmentation.

    `any_thread`: whether `read` may run in a thread during a training step, since it uses no global state.
    """

    left_out: set[str]
    any_thread: bool

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
        self._scale, self._shift = (each.to(placement.device, placement.dtype) for each in scale_and_shift(spec))
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pool = BufferPool()

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalize pixels (0 to 255), uint8 or floating [N, C, H, W]; the result has the same shape."""
        images = self._new(pixels)
        scale, shift = self._factors_for(images)
        return images.copy_(pixels).mul_(scale).add_(shift)

    def _new(self, pixels: torch.Tensor) -> torch.Tensor:
        (count, channels, height, width), dtype = pixels.shape, self._placement.dtype
        if pixels.device.type != "cpu":
            return torch.empty_like(pixels, dtype=dtype, memory_format=self._placement.memory_format)
        if self._placement.memory_format == torch.channels_last:
            return self._pool.take((count, height, width, channels), dtype).permute(0, 3, 1, 2)
        return self._pool.take(pixels.shape, dtype)

    def _factors_for(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and shift. For channels-last on a CPU, expand them to a full image, which vectorizes better."""
        if images.device.type != "cpu" or images.is_contiguous():
            return self._scale, self._shift
        factors = self._factors
        if factors is None or factors[0].shape[1:] != images.shape[1:]:
            blank = torch.zeros_like(images[:1])
            self._factors = factors = (blank + self._scale, blank + self._shift)
        return factors


def change_at_random(pixels: torch.Tensor, draws: Draws, config: AugmentConfig) -> torch.Tensor:
    """Apply RandAugment or TrivialAugment, if configured, to uint8 [N, C, H, W] in place."""
    if config.trivial_augment:
        from lockstep.data.augment.policies import trivial_augment_  # with torchvision's transforms

        return trivial_augment_(pixels, draws)
    if not config.rand_augment:
        return pixels
    from lockstep.data.augment.policies import rand_augment_  # with torchvision's transforms

    return rand_augment_(pixels, draws, config.rand_augment, config.rand_augment_magnitude)


class MemoryReader:
    """Reads batches from images in device memory."""

    def __init__(
        self,
        split: MemorySplit,
        spec: InputSpec,
        placement: Placement,
        config: AugmentConfig,
        seed: int,
        sizes: Sizes | None = None,
    ):
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
        self._sizes = sizes or {}
        self.left_out: set[str] = set()
        self.any_thread = True

    def read(self, plan: Sequence[Indices], epoch: int | None) -> Iterator[Batch]:
        for samples in plan:
            labels = self._labels.index_select(0, send(samples, self._labels.device))
            draws = Draws(self._seed, epoch or 0, samples)
            config = AugmentConfig() if epoch is None else self._config
            yield Batch(self._images_of(draws, config, side_at(self._sizes, epoch)), labels)

    def _images_of(self, draws: Draws, config: AugmentConfig, side: int | None) -> torch.Tensor:
        pixels = resize(transforms.gather(self._images, draws, config), side)
        pixels = change_at_random(pixels, draws, config)
        if transforms.warps(config):
            pixels = transforms.warp(pixels.to(self._dtype), draws, config)
        images = self._normalize(pixels)
        images = transforms.cutout_(images, draws, config.cutout) if config.cutout else images
        return erase_(images, draws, config.random_erasing) if config.random_erasing else images

    def close(self) -> None:
        pass
