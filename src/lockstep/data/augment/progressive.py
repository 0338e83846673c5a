"""Progressive resizing: smaller, cheaper training images in early epochs. Evaluation uses the full size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lockstep.data.sets import InputSpec
from lockstep.errors import ConfigError
from lockstep.models.trial_forward import UnfitImageError, send_blank

Sizes = Mapping[int, int]  # first epoch (from 0) -> side in pixels, as DataConfig.sizes_by_epoch


def side_at(sizes: Sizes, epoch: int | None) -> int | None:
    """Return the shorter side of images in an epoch (None: evaluation); None if their size does not change."""
    if epoch is None:
        return None
    return next((side for first, side in sorted(sizes.items(), reverse=True) if first <= epoch), None)


def resize(images: torch.Tensor, side: int | None) -> torch.Tensor:
    """Resize uint8 [N, C, H, W] to a shorter side of `side` pixels, bilinearly with antialiasing; None: unchanged."""
    if side is None or side == min(images.shape[2:]):
        return images
    from torchvision.transforms.v2 import functional as F

    resized: torch.Tensor = F.resize(images, [side], antialias=True)
    return resized


def check_sizes(model: nn.Module, sizes: Sizes, spec: InputSpec) -> None:
    """Check, before training, that the model accepts all sizes, by a forward pass of a blank image of each.

    Raises:
        ConfigError: The model does not accept a size.
    """
    blank = torch.zeros(1, spec.channels, spec.height, spec.width, dtype=torch.uint8, device="cpu")
    for side in sorted(set(sizes.values())):
        try:
            send_blank(model, resize(blank, side))
        except UnfitImageError as error:
            raise ConfigError(
                f"--progressive-sizes: this model does not accept images of {side} pixels ({error}); choose a larger "
                f"size, or a model that accepts any size"
            ) from None
