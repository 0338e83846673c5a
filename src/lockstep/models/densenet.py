"""DenseNet-121 for 32 x 32 images: each layer takes the outputs of all earlier layers of its stage.

G. Huang, Z. Liu, L. van der Maaten, K. Weinberger, "Densely Connected Convolutional Networks", arXiv 1608.06993, with
bottlenecks and halving transitions. For small images, the first convolution is 3 x 3, without pooling.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.models.blocks import GlobalMean, chain, conv, initialize

COUNTS = (6, 12, 24, 16)
GROWTH = 32


class DenseLayer(nn.Module):
    """Prepends GROWTH channels to its input, computed by a 1 x 1 (4 * GROWTH channels) and a 3 x 3 convolution."""

    def __init__(self, in_channels: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = conv(in_channels, 4 * GROWTH, 1)
        self.bn2 = nn.BatchNorm2d(4 * GROWTH)
        self.conv2 = conv(4 * GROWTH, GROWTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.conv1(torch.relu(self.bn1(x)))
        out = self.conv2(torch.relu(self.bn2(out)))
        return torch.cat([out, x], 1)


def _transition(in_channels: int, channels: int) -> nn.Module:
    """Between two stages: reduces the channels and halves the size."""
    return chain(
        bn=nn.BatchNorm2d(in_channels),
        relu=nn.ReLU(inplace=True),
        conv=conv(in_channels, channels, 1),
        pool=nn.AvgPool2d(2),
    )


def densenet121(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Map [N, C, 32, 32] to logits [N, num_classes]."""
    channels = 2 * GROWTH
    parts: dict[str, nn.Module] = {"conv1": conv(in_channels, channels, 3)}
    for number, count in enumerate(COUNTS, start=1):
        parts[f"dense{number}"] = nn.Sequential(*(DenseLayer(channels + layer * GROWTH) for layer in range(count)))
        channels += count * GROWTH
        if number < len(COUNTS):
            parts[f"trans{number}"] = _transition(channels, channels // 2)
            channels //= 2
    return initialize(
        chain(
            **parts,
            bn=nn.BatchNorm2d(channels),
            relu=nn.ReLU(inplace=True),
            pool=GlobalMean(),
            linear=nn.Linear(channels, num_classes),
        )
    )
