"""TrivialAugment on uint8 batches (S. Müller, F. Hutter, arXiv 2103.10158), seeded by (seed, epoch, sample).

Each image gets one operation with its own strength, from the wide ranges of the paper, as in torchvision's
TrivialAugmentWide. Sampling is bilinear.
"""

from __future__ import annotations

import torch

from lockstep.data.augment.operations import MAGNITUDES, Ranges, change_, changes
from lockstep.data.augment.random_draws import Draws

CHANGES = changes(Ranges(slope=0.99, shift=lambda side: 32, degrees=135, factor=0.99, bits=6))


def trivial_augment_(images: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Augment images, uint8 [N, C, H, W] with 1 or 3 channels, in place."""
    magnitudes = draws.integers("trivial augment magnitude", 0, MAGNITUDES)
    return change_(images, CHANGES, draws, "trivial augment", "trivial augment sign", magnitudes)
