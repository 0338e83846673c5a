"""ResNet for 32 x 32 images.

K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", arXiv 1512.03385, in the usual
version for CIFAR: a 3 x 3 first convolution without pooling, then the four stages of the ImageNet network.
"""

from __future__ import annotations

from torch import nn

from lockstep.models.blocks import BasicBlock, Bottleneck, conv, staged_net, stages

WIDTHS = (64, 128, 256, 512)
STRIDES = (1, 2, 2, 2)


def _bottleneck(in_channels: int, width: int, stride: int) -> nn.Module:
    return Bottleneck(in_channels, width, 4 * width, stride)


def _deep(counts: tuple[int, ...], num_classes: int, in_channels: int) -> nn.Module:
    layers = stages(_bottleneck, 64, list(zip(WIDTHS, STRIDES, counts, strict=True)), expansion=4)
    return staged_net(conv(in_channels, 64, 3), layers, 4 * WIDTHS[-1], num_classes)


def resnet18(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Two basic blocks per stage; maps [N, C, 32, 32] to logits [N, num_classes]."""
    layers = stages(BasicBlock, 64, list(zip(WIDTHS, STRIDES, (2, 2, 2, 2), strict=True)))
    return staged_net(conv(in_channels, 64, 3), layers, WIDTHS[-1], num_classes)


def resnet50(num_classes: int, in_channels: int = 3) -> nn.Module:
    """16 bottlenecks; maps [N, C, 32, 32] to logits [N, num_classes]."""
    return _deep((3, 4, 6, 3), num_classes, in_channels)


def resnet101(num_classes: int, in_channels: int = 3) -> nn.Module:
    """33 bottlenecks; maps [N, C, 32, 32] to logits [N, num_classes]."""
    return _deep((3, 4, 23, 3), num_classes, in_channels)
