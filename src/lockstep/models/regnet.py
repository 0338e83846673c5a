"""RegNetX-200MF and RegNetY-400MF for 32 x 32 images.

I. Radosavovic, R. Kosaraju, R. Girshick, K. He, P. Dollár, "Designing Network Design Spaces", arXiv 2003.13678: grouped
bottlenecks without expansion, with the paper's depths and widths; Y adds squeeze-and-excitation. For small images, the
first convolution has 64 channels, and it and the first two stages have stride 1.
"""

from __future__ import annotations

from torch import nn

from lockstep.models.blocks import Bottleneck, conv, staged_net, stages

STRIDES = (1, 1, 2, 2)
STEM = 64


def _build(
    depths: tuple[int, ...],
    widths: tuple[int, ...],
    group_width: int,
    squeeze_ratio: float,
    num_classes: int,
    in_channels: int,
) -> nn.Module:
    def block(in_channels: int, width: int, stride: int) -> nn.Module:
        squeeze = round(squeeze_ratio * in_channels)
        return Bottleneck(in_channels, width, width, stride, groups=width // group_width, squeeze=squeeze)

    layers = stages(block, STEM, list(zip(widths, STRIDES, depths, strict=True)))
    return staged_net(conv(in_channels, STEM, 3), layers, widths[-1], num_classes)


def regnetx_200mf(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Map [N, C, 32, 32] to logits [N, num_classes]."""
    return _build((1, 1, 4, 7), (24, 56, 152, 368), 8, 0.0, num_classes, in_channels)


def regnety_400mf(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Map [N, C, 32, 32] to logits [N, num_classes]."""
    return _build((1, 2, 7, 12), (32, 64, 160, 384), 16, 0.25, num_classes, in_channels)
