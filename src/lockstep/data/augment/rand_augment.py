"""RandAugment on uint8 batches (E. Cubuk et al., arXiv 1909.13719), seeded by (seed, epoch, sample).

Operations and magnitudes are those of torchvision's RandAugment, with bilinear sampling. All images share the
magnitude.
"""

from __future__ import annotations

import torch

from lockstep.data.augment.operations import Ranges, change_, changes
from lockstep.data.augment.random_draws import Draws

CHANGES = changes(Ranges(slope=0.3, shift=lambda side: 150 / 331 * side, degrees=30, factor=0.9, bits=4))


def rand_augment_(images: torch.Tensor, draws: Draws, rounds: int, magnitude: int) -> torch.Tensor:
    """Apply `rounds` randomly drawn operations to each image, in place.

    Args:
        images: uint8 [N, C, H, W] with 1 or 3 channels; gray images get no color operations.
        draws: The draws of the N samples.
        magnitude: Strength, from 0 to 30.
    """
    for number in range(rounds):
        change_(images, CHANGES, draws, f"rand augment {number}", f"rand augment sign {number}", magnitude)
    return images
