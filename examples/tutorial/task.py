"""The data set and the network that every step of the tutorial uses.

The scripts in this folder import it: Python puts the folder of a script on its search path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.data.sources import digits


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set (1,437 images) and the test set (360).

    Images are [1, 8, 8] with mean 0 and variance 1, labels are 0 to 9.
    """
    data: Any = digits.load()
    (mean,), (deviation,) = data.input.mean, data.input.std
    train, test = (
        TensorDataset((split.images / 255 - mean) / deviation, split.labels) for split in (data.train, data.val)
    )
    return train, test


def build_model(seed: int = 0) -> nn.Sequential:
    """Return two convolutions and two linear layers: 38,282 weights, determined by the seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def count_correct(model: nn.Module, samples: Dataset[tuple[Tensor, ...]], device: torch.device) -> Tensor:
    """Return the number of correctly classified images and the number of images, as a tensor of 2 elements."""
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.inference_mode():
        for images, labels in DataLoader(samples, batch_size=256):
            hits = model(images.to(device)).argmax(1) == labels.to(device)
            counts += torch.stack([hits.sum(), torch.tensor(len(hits), device=device)])
    model.train()
    return counts
