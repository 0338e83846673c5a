"""ResNet-18 with norm and ReLU before each convolution, for 32 x 32 images.

K. He, X. Zhang, S. Ren, J. Sun, "Identity Mappings in Deep Residual Networks", arXiv 1603.05027: no activation
follows the sum of a block, so that signals pass unchanged. As in pytorch-cifar, no norm follows the last block.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.models.blocks import GlobalMean, chain, conv, initialize, stages


class PreActBlock(nn.Module):
    """Norm, ReLU and 3 x 3 convolution, twice, and a shortcut; a projecting shortcut starts after the first ReLU."""

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = conv(in_channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = conv(channels, channels, 3)
        self.projects = stride != 1 or in_channels != channels
        self.shortcut = nn.Sequential(conv(in_channels, channels, 1, stride)) if self.projects else nn.Sequential()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = torch.relu(self.bn1(x))
        beside = self.shortcut(active) if self.projects else x
        out: torch.Tensor = self.conv2(torch.relu(self.bn2(self.conv1(active)))) + beside
        return out


def preactresnet18(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Map [N, C, 32, 32] to logits [N, num_classes]."""
    layers = stages(PreActBlock, 64, [(64, 1, 2), (128, 2, 2), (256, 2, 2), (512, 2, 2)])
    linear = nn.Linear(512, num_classes)
    return initialize(chain(conv1=conv(in_channels, 64, 3), **layers, pool=GlobalMean(), linear=linear))
