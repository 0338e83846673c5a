"""The image operations of RandAugment and TrivialAugment, on whole batches of bytes, in torchvision's forms.

Sampling is bilinear. Images that get the same operation at the same strength are changed in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep.data.augment.random_draws import Draws
from lockstep.data.pipeline.sending import send

MAGNITUDES = 30
SIGNED = (
    "shear x",
    "shear y",
    "translate x",
    "translate y",
    "rotate",
    "brightness",
    "contrast",
    "sharpness",
    "saturation",
)
"""Those whose strength is negative half of the time."""
COLOR_ONLY = ("saturation",)
# From images, uint8 [N, C, H, W], and a strength from -1 to 1 to images of the same shape.
Change = Callable[[torch.Tensor, float], torch.Tensor]


@dataclass(frozen=True)
class Ranges:
    """What strength 1 is.

    Args:
        slope: Of a slant.
        shift: From an image's side to the pixels that it moves by.
        degrees: Of a rotation.
        factor: Added to 1 for brightness, contrast, sharpness and saturation.
        bits: That posterizing takes away.
    """

    slope: float
    shift: Callable[[int], float]
    degrees: float
    factor: float
    bits: int


def changes(ranges: Ranges) -> dict[str, Change]:
    """The operations by name."""
    slope, shift, factor = ranges.slope, ranges.shift, ranges.factor
    return {
        "shear x": lambda images, strength: _affine(images, slant_x=slope * strength),
        "shear y": lambda images, strength: _affine(images, slant_y=slope * strength),
        "translate x": lambda images, strength: _affine(images, x=int(shift(images.shape[3]) * strength)),
        "translate y": lambda images, strength: _affine(images, y=int(shift(images.shape[2]) * strength)),
        "rotate": lambda images, strength: F.rotate(images, ranges.degrees * strength, InterpolationMode.BILINEAR),
        "brightness": lambda images, strength: F.adjust_brightness(images, 1 + factor * strength),
        "contrast": lambda images, strength: F.adjust_contrast(images, 1 + factor * strength),
        "sharpness": lambda images, strength: F.adjust_sharpness(images, 1 + factor * strength),
        "saturation": lambda images, strength: F.adjust_saturation(images, 1 + factor * strength),
        "identity": lambda images, strength: images,
        "posterize": lambda images, strength: F.posterize(images, 8 - round(ranges.bits * strength)),
        "solarize": lambda images, strength: F.solarize(images, 255 * (1 - strength)),
        "autocontrast": lambda images, strength: F.autocontrast(images),
        "equalize": lambda images, strength: F.equalize(images),
    }


def _affine(images: torch.Tensor, x: int = 0, y: int = 0, slant_x: float = 0.0, slant_y: float = 0.0) -> torch.Tensor:
    """Move by whole pixels or slant by a slope; slants leave the upper left corner where it is, as the paper's do."""
    slants = [math.degrees(math.atan(slope)) for slope in (slant_x, slant_y)]
    centre = [0.0, 0.0] if slant_x or slant_y else None
    moved: torch.Tensor = F.affine(images, 0.0, [x, y], 1.0, slants, InterpolationMode.BILINEAR, center=centre)
    return moved


def change_(
    images: torch.Tensor,
    table: Mapping[str, Change],
    draws: Draws,
    choice: str,
    sign: str,
    magnitudes: npt.NDArray[np.int64] | int,
) -> torch.Tensor:
    """Change each image by one operation drawn for it, in place.

    Args:
        images: uint8 [N, C, H, W] with 1 or 3 channels; gray images get no change of color.
        choice: The purpose of the draw of the operation.
        sign: That of the draw of its sign.
        magnitudes: Of each image, [N], or of all; from 0 to 30.
    """
    names = [name for name in table if images.shape[1] == 3 or name not in COLOR_ONLY]
    chosen = draws.integers(choice, 0, len(names) - 1)
    signs = np.where(draws.uniform(sign) < 0.5, -1, 1)
    signs[[names[number] not in SIGNED for number in chosen]] = 1
    amounts = signs * magnitudes
    for number, amount in np.unique(np.stack([chosen, amounts], 1), axis=0).tolist():
        if names[number] == "identity":
            continue
        group = send(np.flatnonzero((chosen == number) & (amounts == amount)), images.device)
        images[group] = table[names[number]](images[group], amount / MAGNITUDES)
    return images
