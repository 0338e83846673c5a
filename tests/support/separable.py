"""A data set that a linear model learns in one epoch, and that model."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

CLASSES = 3


def separable(samples: int, seed: int, contrast: float = 1.0) -> TensorDataset:
    """Return images [3, 4, 4] whose channel of their class is brighter, by the contrast."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    images = torch.randn(samples, 3, 4, 4, generator=generator) * 0.3
    images[torch.arange(samples), labels] += contrast
    return TensorDataset(images, labels)


def linear_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, CLASSES))
