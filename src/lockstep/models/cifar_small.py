"""A small residual network for 32 x 32 color images, sized for CPUs.

A 4 x 4 convolution with stride 2 comes first, so that nearly all computation is at 16 x 16 and 8 x 8. There is one
residual block (K. He et al., arXiv 1512.03385) at 8 x 8, and global max pooling before the classifier. The network is a
smaller version of D. Page's ResNet-9 ("How to Train Your ResNet", 2018).
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.models.blocks import ConvUnit


class Residual(nn.Module):
    """Adds the output of two convolutions to their input."""

    def __init__(self, channels: int):
        super().__init__()
        self.branch = nn.Sequential(ConvUnit(channels, channels), ConvUnit(channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.branch(x)
        return out


def build(num_classes: int, in_channels: int = 3, widths: tuple[int, int, int, int] = (32, 64, 96, 128)) -> nn.Module:
    """Map [N, C, 32, 32] to logits [N, num_classes]; `widths` are the channels of the four stages."""
    stem, early, middle, late = widths
    return nn.Sequential(
        ConvUnit(in_channels, stem, kernel=4, stride=2),
        ConvUnit(stem, early),
        nn.MaxPool2d(2),
        ConvUnit(early, middle),
        Residual(middle),
        nn.MaxPool2d(2),
        ConvUnit(middle, late),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(late, num_classes),
    )
