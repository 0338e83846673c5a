"""Residual networks for 32 x 32 images: ResNet, ResNet with norms first, ResNeXt, RegNet.

ResNet is by K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", arXiv 1512.03385, in the
usual version for CIFAR: a 3 x 3 first convolution without pooling, then the four stages of the ImageNet network.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.models.blocks import BasicBlock, Bottleneck, GlobalMean, chain, conv, initialize, staged_net, stages

RESNET_WIDTHS = (64, 128, 256, 512)
RESNET_STRIDES = (1, 2, 2, 2)


def _bottleneck(in_channels: int, width: int, stride: int) -> nn.Module:
    return Bottleneck(in_channels, width, 4 * width, stride)


def _deep_resnet(counts: tuple[int, ...], num_classes: int, in_channels: int) -> nn.Module:
    layers = stages(_bottleneck, 64, list(zip(RESNET_WIDTHS, RESNET_STRIDES, counts, strict=True)), expansion=4)
    return staged_net(conv(in_channels, 64, 3), layers, 4 * RESNET_WIDTHS[-1], num_classes)


def resnet18(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Two basic blocks per stage; maps [N, C, 32, 32] to logits [N, num_classes]."""
    layers = stages(BasicBlock, 64, list(zip(RESNET_WIDTHS, RESNET_STRIDES, (2, 2, 2, 2), strict=True)))
    return staged_net(conv(in_channels, 64, 3), layers, RESNET_WIDTHS[-1], num_classes)


def resnet50(num_classes: int, in_channels: int = 3) -> nn.Module:
    """16 bottlenecks; maps [N, C, 32, 32] to logits [N, num_classes]."""
    return _deep_resnet((3, 4, 6, 3), num_classes, in_channels)


def resnet101(num_classes: int, in_channels: int = 3) -> nn.Module:
    """33 bottlenecks; maps [N, C, 32, 32] to logits [N, num_classes]."""
    return _deep_resnet((3, 4, 23, 3), num_classes, in_channels)


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
    """ResNet-18 with norm and ReLU before each convolution, for 32 x 32 images.

    K. He, X. Zhang, S. Ren, J. Sun, "Identity Mappings in Deep Residual Networks", arXiv 1603.05027: no activation
    follows the sum of a block, so that signals pass unchanged. As in pytorch-cifar, no norm follows the last block.

    Map [N, C, 32, 32] to logits [N, num_classes].
    """
    layers = stages(PreActBlock, 64, [(64, 1, 2), (128, 2, 2), (256, 2, 2), (512, 2, 2)])
    linear = nn.Linear(512, num_classes)
    return initialize(chain(conv1=conv(in_channels, 64, 3), **layers, pool=GlobalMean(), linear=linear))


RESNEXT_BLOCKS = (
    3  # per stage; 3 stages of 3 blocks of 3 convolutions, the first convolution and the linear layer: 29 layers
)
RESNEXT_EXPANSION = 2


def _resnext(groups: int, group_width: int, num_classes: int, in_channels: int) -> nn.Module:
    """ResNeXt-29 for 32 x 32 images: bottlenecks whose 3 x 3 convolution is split into groups.

    S. Xie, R. Girshick, P. Dollár, Z. Tu, K. He, "Aggregated Residual Transformations for Deep Neural Networks", arXiv
    1611.05431. As in pytorch-cifar, the first convolution is 1 x 1, and the expansion is 2.
    """

    def block(in_channels: int, width: int, stride: int) -> nn.Module:
        return Bottleneck(in_channels, width, RESNEXT_EXPANSION * width, stride, groups=groups)

    width = groups * group_width
    layers = stages(
        block,
        64,
        [(width, 1, RESNEXT_BLOCKS), (2 * width, 2, RESNEXT_BLOCKS), (4 * width, 2, RESNEXT_BLOCKS)],
        RESNEXT_EXPANSION,
    )
    return staged_net(conv(in_channels, 64, 1), layers, 4 * width * RESNEXT_EXPANSION, num_classes)


def resnext29_32x4d(num_classes: int, in_channels: int = 3) -> nn.Module:
    """32 groups of 4 channels in the first stage; maps [N, C, 32, 32] to logits [N, num_classes]."""
    return _resnext(32, 4, num_classes, in_channels)


def resnext29_2x64d(num_classes: int, in_channels: int = 3) -> nn.Module:
    """2 groups of 64 channels in the first stage; maps [N, C, 32, 32] to logits [N, num_classes]."""
    return _resnext(2, 64, num_classes, in_channels)


REGNET_STRIDES = (1, 1, 2, 2)
REGNET_STEM = 64


def _regnet(
    depths: tuple[int, ...],
    widths: tuple[int, ...],
    group_width: int,
    squeeze_ratio: float,
    num_classes: int,
    in_channels: int,
) -> nn.Module:
    """RegNetX-200MF and RegNetY-400MF for 32 x 32 images.

    I. Radosavovic, R. Kosaraju, R. Girshick, K. He, P. Dollár, "Designing Network Design Spaces", arXiv 2003.13678:
    grouped bottlenecks without expansion, with the paper's depths and widths; Y adds squeeze-and-excitation. For small
    images, the first convolution has 64 channels, and it and the first two stages have stride 1.
    """

    def block(in_channels: int, width: int, stride: int) -> nn.Module:
        squeeze = round(squeeze_ratio * in_channels)
        return Bottleneck(in_channels, width, width, stride, groups=width // group_width, squeeze=squeeze)

    layers = stages(block, REGNET_STEM, list(zip(widths, REGNET_STRIDES, depths, strict=True)))
    return staged_net(conv(in_channels, REGNET_STEM, 3), layers, widths[-1], num_classes)


def regnetx_200mf(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Map [N, C, 32, 32] to logits [N, num_classes]."""
    return _regnet((1, 1, 4, 7), (24, 56, 152, 368), 8, 0.0, num_classes, in_channels)


def regnety_400mf(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Map [N, C, 32, 32] to logits [N, num_classes]."""
    return _regnet((1, 2, 7, 12), (32, 64, 160, 384), 16, 0.25, num_classes, in_channels)
