"""The small network of PyTorch's and Horovod's MNIST examples: 21,840 parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Maps floating-point grayscale images [N, 1, 28, 28] to logits [N, num_classes]."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.dropout = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = F.relu(F.max_pool2d(self.conv1(images), 2))
        found = F.relu(F.max_pool2d(self.dropout(self.conv2(found)), 2))
        hidden = F.dropout(F.relu(self.fc1(found.flatten(1))), training=self.training)
        logits: torch.Tensor = self.fc2(hidden)
        return logits
