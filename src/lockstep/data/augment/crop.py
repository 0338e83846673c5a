"""Random resized crop, as in ImageNet training.

The area is uniform between `min_crop` and 1, the aspect ratio log-uniform between 3/4 and 4/3, the position uniform.
If ten attempts do not fit, the largest center crop is used. The distribution is that of C. Szegedy et al. (arXiv
1409.4842), as in torchvision's RandomResizedCrop.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.data.augment.random_draws import Draws
from lockstep.data.pipeline.decode import Box

ATTEMPTS = 10
RATIO = (3 / 4, 4 / 3)


class RandomCrop:
    """Random crops of a batch of samples, drawn before the image sizes are known."""

    def __init__(self, draws: Draws, min_crop: float):
        attempts = range(ATTEMPTS)
        self._areas = np.stack([draws.between(f"crop area {k}", min_crop, 1.0) for k in attempts], 1)
        low, high = map(math.log, RATIO)
        self._ratios = np.exp(np.stack([draws.between(f"crop ratio {k}", low, high) for k in attempts], 1))
        self._x = draws.uniform("crop x")
        self._y = draws.uniform("crop y")

    def box(self, position: int, width: int, height: int) -> Box:
        """Return (left, top, right, bottom) in pixels for the sample at `position` in the draws."""
        areas, ratios = self._areas[position] * width * height, self._ratios[position]
        widths, heights = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
        fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
        if fits.any():
            first = int(fits.argmax())
            crop_width, crop_height = float(widths[first]), float(heights[first])
            left = math.floor(self._x[position] * (width - crop_width + 1))
            top = math.floor(self._y[position] * (height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
        ratio = min(max(width / height, RATIO[0]), RATIO[1])
        crop_width, crop_height = min(width, height * ratio), min(height, width / ratio)
        left_edge, top_edge = (width - crop_width) / 2, (height - crop_height) / 2
        return left_edge, top_edge, left_edge + crop_width, top_edge + crop_height
