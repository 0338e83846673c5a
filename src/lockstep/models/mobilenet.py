"""MobileNetV2 for 32 x 32 images.

M. Sandler, A. Howard, M. Zhu, A. Zhmoginov, L.-C. Chen, "MobileNetV2: Inverted Residuals and Linear Bottlenecks", arXiv
1801.04381. For small images, the first convolution and the second group have stride 1. As in pytorch-cifar, every block
with stride 1 has a shortcut, with a 1 x 1 convolution if the number of channels changes, and ReLU replaces ReLU6.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.models.blocks import Bottleneck, GlobalMean, chain, conv, initialize, shortcut

# expansion, channels, blocks, stride of the first block
GROUPS = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
STEM, LAST = 32, 1280


class InvertedResidual(Bottleneck):
    """A bottleneck with `expansion` times the channels inside, a depthwise 3 x 3 convolution and no final ReLU."""

    def __init__(self, in_channels: int, channels: int, expansion: int, stride: int):
        width = expansion * in_channels
        beside = shortcut(in_channels, channels, stride) if stride == 1 else nn.Sequential()
        super().__init__(in_channels, width, channels, stride, groups=width, beside=beside)
        self.adds = stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.branch(x)
        return out + self.shortcut(x) if self.adds else out


def mobilenetv2(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Map [N, C, 32, 32] to logits [N, num_classes]."""
    blocks: list[nn.Module] = []
    channels = STEM
    for expansion, width, count, stride in GROUPS:
        for number in range(count):
            blocks.append(InvertedResidual(channels, width, expansion, stride if number == 0 else 1))
            channels = width
    return initialize(
        chain(
            conv1=conv(in_channels, STEM, 3),
            bn1=nn.BatchNorm2d(STEM),
            relu1=nn.ReLU(inplace=True),
            layers=nn.Sequential(*blocks),
            conv2=conv(channels, LAST, 1),
            bn2=nn.BatchNorm2d(LAST),
            relu2=nn.ReLU(inplace=True),
            pool=GlobalMean(),
            linear=nn.Linear(LAST, num_classes),
        )
    )
