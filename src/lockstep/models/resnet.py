"""ResNet for 32 x 32 images.

K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", arXiv 1512.03385, in the form that
CIFAR models usually take: a 3 x 3 first convolution without pooling, then the four stages of the ImageNet network.
"""

from __future__ import annotations

import torch
from torch import nn


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of basic blocks with 64, 128, 256 and 512 channels: [N, C, 32, 32] to logits [N, num_classes]."""

    def __init__(self, blocks: tuple[int, ...], num_classes: int, in_channels: int):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        )
        stages: list[nn.Module] = []
        channels = 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for block in range(count):
                stages.append(BasicBlock(channels, width, stride=2 if stage > 0 and block == 0 else 1))
                channels = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return logits


def resnet18(num_classes: int, in_channels: int = 3) -> nn.Module:
    """ResNet-18 for 32 x 32 images: 11,173,962 parameters with 10 classes and 3 channels."""
    return ResNet((2, 2, 2, 2), num_classes, in_channels)
