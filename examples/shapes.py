"""A custom network and data set for `lockstep train --model shapes:build --data shapes:load`: disks and squares."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


def build(num_classes: int) -> nn.Module:
    """Build a network from images [N, 1, 16, 16] to logits [N, num_classes]."""
    return nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(576, num_classes))


class Shapes(Dataset[tuple[Tensor, int]]):
    """Images that depend only on the index, so that all workers see the same ones."""

    classes = ("disk", "square")

    def __init__(self, samples: int, first: int) -> None:
        self.samples, self.first = samples, first
        self.targets = [index % 2 for index in range(samples)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        radius = 3 + 4 * torch.rand(1, generator=generator)
        y, x = torch.meshgrid(torch.arange(16) - 7.5, torch.arange(16) - 7.5, indexing="ij")
        distance = torch.maximum(x.abs(), y.abs()) / 0.886 if self.targets[index] else (x**2 + y**2).sqrt()
        noise = 0.3 * torch.randn(16, 16, generator=generator)
        return ((distance < radius).float() + noise).unsqueeze(0), self.targets[index]


def load() -> tuple[Shapes, Shapes]:
    """Return the training and validation images."""
    return Shapes(1024, 0), Shapes(256, 1_000_000)
