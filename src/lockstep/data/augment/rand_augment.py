"""RandAugment on whole batches of bytes (E. Cubuk et al., arXiv 1909.13719), drawn from (seed, epoch, sample).

The operations and what a magnitude means for each are those of torchvision's RandAugment, with bilinear sampling. All
images of a batch share the magnitude.
"""

from __future__ import annotations

import torch

from lockstep.data.augment.operations import Ranges, change_, changes
from lockstep.data.augment.random_draws import Draws

CHANGES = changes(Ranges(slope=0.3, shift=lambda side: 150 / 331 * side, degrees=30, factor=0.9, bits=4))


def rand_augment_(images: torch.Tensor, draws: Draws, rounds: int, magnitude: int) -> torch.Tensor:
    """Change each image `rounds` times, in place, each time by one operation drawn for it.

    Args:
        images: uint8 [N, C, H, W] with 1 or 3 channels; gray images get no change of color.
        draws: The draws of the N samples.
        magnitude: Strength, from 0 to 30.
    """
    for number in range(rounds):
        change_(images, CHANGES, draws, f"rand augment {number}", f"rand augment sign {number}", magnitude)
    return images
