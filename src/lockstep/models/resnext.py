"""ResNeXt-29 for 32 x 32 images: bottlenecks whose 3 x 3 convolution is split into groups.

S. Xie, R. Girshick, P. Dollár, Z. Tu, K. He, "Aggregated Residual Transformations for Deep Neural Networks", arXiv
1611.05431. As in pytorch-cifar, the first convolution is 1 x 1, and the expansion is 2.
"""

from __future__ import annotations

from torch import nn

from lockstep.models.blocks import Bottleneck, conv, staged_net, stages

BLOCKS = 3  # per stage; 3 stages of 3 blocks of 3 convolutions, the first convolution and the linear layer: 29 layers
EXPANSION = 2


def _build(groups: int, group_width: int, num_classes: int, in_channels: int) -> nn.Module:
    def block(in_channels: int, width: int, stride: int) -> nn.Module:
        return Bottleneck(in_channels, width, EXPANSION * width, stride, groups=groups)

    width = groups * group_width
    layers = stages(block, 64, [(width, 1, BLOCKS), (2 * width, 2, BLOCKS), (4 * width, 2, BLOCKS)], EXPANSION)
    return staged_net(conv(in_channels, 64, 1), layers, 4 * width * EXPANSION, num_classes)


def resnext29_32x4d(num_classes: int, in_channels: int = 3) -> nn.Module:
    """32 groups of 4 channels in the first stage; maps [N, C, 32, 32] to logits [N, num_classes]."""
    return _build(32, 4, num_classes, in_channels)


def resnext29_2x64d(num_classes: int, in_channels: int = 3) -> nn.Module:
    """2 groups of 64 channels in the first stage; maps [N, C, 32, 32] to logits [N, num_classes]."""
    return _build(2, 64, num_classes, in_channels)
