"""Shared by all steps of the tutorial: the digits and the network.

The scripts in this folder import it: Python puts a script's folder on its search path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.data.sources import digits


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training set (1,437) and test set (360): images [1, 8, 8] with mean 0 and variance 1, labels 0 to 9."""
    data: Any = digits.load()
    (mean,), (deviation,) = data.input.mean, data.input.std
    train, test = (
        TensorDataset((split.images / 255 - mean) / deviation, split.labels) for split in (data.train, data.val)
    )
    return train, test


def build_model(seed: int = 0) -> nn.Sequential:
    """Build two convolutions and two linear layers, 38,282 weights; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def count_right(model: nn.Module, samples: Dataset[tuple[Tensor, ...]], device: torch.device) -> Tensor:
    """Return the number of correctly classified images and of all images, as a tensor that workers can sum."""
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.inference_mode():
        for images, labels in DataLoader(samples, batch_size=256):
            hits = model(images.to(device)).argmax(1) == labels.to(device)
            counts += torch.stack([hits.sum(), torch.tensor(len(hits), device=device)])
    model.train()
    return counts
