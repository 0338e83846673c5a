"""Random erasing (Z. Zhong et al., arXiv 1708.04896), seeded by (seed, epoch, sample).

Blanks a rectangle of 2 to 33 % of the area, with a log-uniform aspect ratio between 0.3 and 3.3, at a random position.
If ten attempts do not fit, the image is unchanged. The distribution is that of torchvision's RandomErasing.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from lockstep.data.augment.random_draws import Draws
from lockstep.data.pipeline.sending import send

ATTEMPTS = 10
AREA = (0.02, 0.33)
RATIO = (0.3, 3.3)


def erase_(images: torch.Tensor, draws: Draws, share: float) -> torch.Tensor:
    """Blank a rectangle in each image with probability `share`, in place.

    Args:
        images: Normalized, floating [N, C, H, W]; blank pixels are 0, the mean.
    """
    height, width = images.shape[2:]
    attempts = range(ATTEMPTS)
    areas = height * width * np.stack([draws.between(f"erasing area {k}", *AREA) for k in attempts], 1)
    low, high = map(math.log, RATIO)
    ratios = np.exp(np.stack([draws.between(f"erasing ratio {k}", low, high) for k in attempts], 1))
    heights, widths = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (heights < height) & (widths < width)
    first = np.arange(len(fits)), fits.argmax(1)
    erased = (draws.uniform("erasing") < share) & fits.any(1)
    masks = []
    for purpose, length, sides in (("row", height, heights), ("column", width, widths)):
        side = np.where(erased, sides[first], 0)[:, None]
        start = np.floor(draws.uniform(f"erasing {purpose}")[:, None] * (length - side + 1))
        position = np.arange(length)[None]
        masks.append(send((position >= start) & (position < start + side), images.device))
    return images.masked_fill_((masks[0][:, :, None] & masks[1][:, None, :])[:, None], 0.0)
