"""A data set that a linear model learns in one epoch, that model, and its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.train import Result, fit

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


def fit_separable(
    path: Path, model: nn.Module | None = None, train: int = 64, val: int = 32, contrast: float = 1.0, **settings: Any
) -> Result:
    """Train on so many samples in `path`, in batches of 16 for three epochs, unless `settings` say otherwise."""
    common: dict[str, Any] = {"epochs": 3, "batch_size": 16, "loader_workers": 0, "track": (), "run_dir": path}
    return fit(model or linear_net(), separable(train, 1, contrast), separable(val, 2, contrast), **common | settings)
