"""Synthetic images: noise in memory, to measure training without input."""

from __future__ import annotations

import os

import torch

from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.errors import DataError

CLASSES = 1000
TRAIN_SAMPLES, VAL_SAMPLES = 1024, 256


def load(side: int) -> ImageData:
    """Return 1,024 training and 256 validation images, uint8 [3, side, side], with random labels of 1,000 classes.

    Raises:
        DataError: The machine has too little memory.
    """
    needed = 3 * side**2 * (TRAIN_SAMPLES + VAL_SAMPLES)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise DataError(
            f"--image-size {side}: synthetic images of {side} x {side} pixels need {needed / 1e9:,.0f} GB of memory, "
            f"but this machine has {memory / 1e9:,.0f} GB; choose a smaller size"
        )
    generator = torch.Generator().manual_seed(0)

    def split(samples: int) -> MemorySplit:
        images = torch.randint(0, 256, (samples, 3, side, side), generator=generator, dtype=torch.uint8, device="cpu")
        return MemorySplit(images, torch.randint(0, CLASSES, (samples,), generator=generator, device="cpu"))

    names = tuple(f"class-{number:03d}" for number in range(CLASSES))
    half = (0.5, 0.5, 0.5)
    return ImageData("synthetic", names, split(TRAIN_SAMPLES), split(VAL_SAMPLES), InputSpec(3, side, side, half, half))
