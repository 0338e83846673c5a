"""Weights computed from training images before the first step, such as those of a whitening layer."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.data.pipeline.readers import Normalizer, Placement
from lockstep.data.sets import ImageData, MemorySplit
from lockstep.errors import ConfigError
from lockstep.models import registry

SAMPLES = 5000


def calibrate(model: nn.Module, arch: str, data: ImageData) -> None:
    """Run the calibration of a new model, if its architecture has one.

    It gets up to 5,000 normalized images on the CPU, evenly spaced over the training set because folders are sorted by
    class. They are the same on every worker.

    Raises:
        ConfigError: The training images are not held in memory.
    """
    work = registry.calibration(arch, min(data.input.height, data.input.width))
    if work is None:
        return
    if not isinstance(data.train, MemorySplit):
        raise ConfigError(
            f"--arch {arch} computes its first layer from training images in memory, but {data.name}'s are not; "
            f"for a folder of small images add --in-memory always, or choose another model"
        )
    images = data.train.images[:: max(1, -(-len(data.train) // SAMPLES))]
    work(model, Normalizer(data.input, Placement(torch.device("cpu")))(images.cpu()))
