"""What several benchmarks train: noise, epochs of a job, an optimizer."""

from __future__ import annotations

import torch
from harness import Work
from torch import nn

from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.train.job import Job
from lockstep.train.loop import train_epoch


def noise(channels: int, side: int, samples: int) -> ImageData:
    """Return square random images of ten classes, which are equal on all workers."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (samples, channels, side, side), dtype=torch.uint8, generator=generator)
    split = MemorySplit(pixels, torch.randint(0, 10, (samples,), generator=generator))
    spec = InputSpec(channels, side, side, (0.5,) * channels, (0.29,) * channels)
    return ImageData("noise", tuple("0123456789"), split, split, spec)


def epoch_of(job: Job, steps: int) -> Work:
    """Return a turn that trains an epoch of so many steps."""

    def turn() -> int:
        train_epoch(job)
        return steps

    return turn


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
