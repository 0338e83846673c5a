"""RandAugment on whole batches of bytes (E. Cubuk et al., arXiv 1909.13719), drawn from (seed, epoch, sample).

The operations and what a magnitude means for each are those of torchvision's RandAugment, with bilinear sampling. All
images of a batch share the magnitude, so those that drew the same operation are changed in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep.data.augment.random_draws import Draws
from lockstep.data.pipeline.sending import send

MAGNITUDES = 30
# From images, uint8 [N, C, H, W], and a strength from -1 to 1 to images of the same shape.
Change = Callable[[torch.Tensor, float], torch.Tensor]


def _affine(images: torch.Tensor, x: int = 0, y: int = 0, slant_x: float = 0.0, slant_y: float = 0.0) -> torch.Tensor:
    """Move by whole pixels or slant by a slope; slants leave the upper left corner where it is, as the paper's do."""
    slants = [math.degrees(math.atan(slope)) for slope in (slant_x, slant_y)]
    centre = [0.0, 0.0] if slant_x or slant_y else None
    moved: torch.Tensor = F.affine(images, 0.0, [x, y], 1.0, slants, InterpolationMode.BILINEAR, center=centre)
    return moved


# Those whose strength is negative half of the time.
SIGNED: dict[str, Change] = {
    "shear x": lambda images, strength: _affine(images, slant_x=0.3 * strength),
    "shear y": lambda images, strength: _affine(images, slant_y=0.3 * strength),
    "translate x": lambda images, strength: _affine(images, x=int(150 / 331 * images.shape[3] * strength)),
    "translate y": lambda images, strength: _affine(images, y=int(150 / 331 * images.shape[2] * strength)),
    "rotate": lambda images, strength: F.rotate(images, 30 * strength, InterpolationMode.BILINEAR),
    "brightness": lambda images, strength: F.adjust_brightness(images, 1 + 0.9 * strength),
    "contrast": lambda images, strength: F.adjust_contrast(images, 1 + 0.9 * strength),
    "sharpness": lambda images, strength: F.adjust_sharpness(images, 1 + 0.9 * strength),
    "saturation": lambda images, strength: F.adjust_saturation(images, 1 + 0.9 * strength),
}
UNSIGNED: dict[str, Change] = {
    "identity": lambda images, strength: images,
    "posterize": lambda images, strength: F.posterize(images, 8 - round(4 * strength)),
    "solarize": lambda images, strength: F.solarize(images, 255 * (1 - strength)),
    "autocontrast": lambda images, strength: F.autocontrast(images),
    "equalize": lambda images, strength: F.equalize(images),
}
CHANGES = SIGNED | UNSIGNED
COLOUR_ONLY = ("saturation",)


def rand_augment_(images: torch.Tensor, draws: Draws, rounds: int, magnitude: int) -> torch.Tensor:
    """Change each image `rounds` times, in place, each time by one operation drawn for it.

    Args:
        images: uint8 [N, C, H, W] with 1 or 3 channels; grey images get no change of colour.
        draws: The draws of the N samples.
        magnitude: Strength, from 0 to 30.
    """
    names = [name for name in CHANGES if images.shape[1] == 3 or name not in COLOUR_ONLY]
    for number in range(rounds):
        chosen = draws.integers(f"rand augment {number}", 0, len(names) - 1)
        signs = np.where(draws.uniform(f"rand augment sign {number}") < 0.5, -1, 1)
        signs[[names[choice] in UNSIGNED for choice in chosen]] = 1
        for choice, sign in np.unique(np.stack([chosen, signs], 1), axis=0).tolist():
            if names[choice] == "identity":
                continue
            group = send(np.flatnonzero((chosen == choice) & (signs == sign)), images.device)
            images[group] = CHANGES[names[choice]](images[group], sign * magnitude / MAGNITUDES)
    return images
