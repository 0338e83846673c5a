"""RandAugment (E. Cubuk et al., arXiv 1909.13719) and TrivialAugment (S. Müller, F. Hutter, arXiv 2103.10158).

Operations and magnitudes are torchvision's, with the wide ranges for TrivialAugment, on uint8 batches, with bilinear
sampling. Images with the same operation and strength are processed in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep.data.random_draws import Draws
from lockstep.world.accelerator import send

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
"""Operations whose strength is negative with probability 1/2."""
COLOR_ONLY = ("saturation",)
# (images, uint8 [N, C, H, W]; strength, -1 to 1) -> images of the same shape
Change = Callable[[torch.Tensor, float], torch.Tensor]


def changes(slope: float, shift: Callable[[int], float], degrees: float, factor: float, bits: int) -> dict[str, Change]:
    """Return the operations by name, with their effects at strength 1.

    Args:
        slope: Slope of a shear.
        shift: Maps an image's side to the pixels of a translation.
        degrees: Angle of a rotation.
        factor: Added to 1 for brightness, contrast, sharpness and saturation.
        bits: Bits that posterize removes.
    """
    return {
        "shear x": lambda images, strength: _affine(images, slant_x=slope * strength),
        "shear y": lambda images, strength: _affine(images, slant_y=slope * strength),
        "translate x": lambda images, strength: _affine(images, x=int(shift(images.shape[3]) * strength)),
        "translate y": lambda images, strength: _affine(images, y=int(shift(images.shape[2]) * strength)),
        "rotate": lambda images, strength: F.rotate(images, degrees * strength, InterpolationMode.BILINEAR),
        "brightness": lambda images, strength: F.adjust_brightness(images, 1 + factor * strength),
        "contrast": lambda images, strength: F.adjust_contrast(images, 1 + factor * strength),
        "sharpness": lambda images, strength: F.adjust_sharpness(images, 1 + factor * strength),
        "saturation": lambda images, strength: F.adjust_saturation(images, 1 + factor * strength),
        "identity": lambda images, strength: images,
        "posterize": lambda images, strength: F.posterize(images, 8 - round(bits * strength)),
        "solarize": lambda images, strength: F.solarize(images, 255 * (1 - strength)),
        "autocontrast": lambda images, strength: F.autocontrast(images),
        "equalize": lambda images, strength: F.equalize(images),
    }


def _affine(images: torch.Tensor, x: int = 0, y: int = 0, slant_x: float = 0.0, slant_y: float = 0.0) -> torch.Tensor:
    """Translate by whole pixels, or shear by a slope about the upper left corner, as in the paper."""
    slants = [math.degrees(math.atan(slope)) for slope in (slant_x, slant_y)]
    center = [0.0, 0.0] if slant_x or slant_y else None
    moved: torch.Tensor = F.affine(images, 0.0, [x, y], 1.0, slants, InterpolationMode.BILINEAR, center=center)
    return moved


def change_(
    images: torch.Tensor,
    table: Mapping[str, Change],
    draws: Draws,
    choice: str,
    sign: str,
    magnitudes: npt.NDArray[np.int64] | int,
) -> torch.Tensor:
    """Apply one randomly drawn operation to each image, in place.

    Args:
        images: uint8 [N, C, H, W] with 1 or 3 channels; gray images get no color operations.
        choice: Purpose string of the draw of the operation.
        sign: Purpose string of the draw of its sign.
        magnitudes: Strength from 0 to 30, of each image [N] or of all.
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


RAND_CHANGES = changes(slope=0.3, shift=lambda side: 150 / 331 * side, degrees=30, factor=0.9, bits=4)


def rand_augment_(images: torch.Tensor, draws: Draws, rounds: int, magnitude: int) -> torch.Tensor:
    """Apply `rounds` randomly drawn operations to each image, in place.

    Args:
        images: uint8 [N, C, H, W] with 1 or 3 channels; gray images get no color operations.
        draws: The draws of the N samples.
        magnitude: Strength, from 0 to 30.
    """
    for number in range(rounds):
        change_(images, RAND_CHANGES, draws, f"rand augment {number}", f"rand augment sign {number}", magnitude)
    return images


TRIVIAL_CHANGES = changes(slope=0.99, shift=lambda side: 32, degrees=135, factor=0.99, bits=6)


def trivial_augment_(images: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Augment images, uint8 [N, C, H, W] with 1 or 3 channels, in place."""
    magnitudes = draws.integers("trivial augment magnitude", 0, MAGNITUDES)
    return change_(images, TRIVIAL_CHANGES, draws, "trivial augment", "trivial augment sign", magnitudes)
