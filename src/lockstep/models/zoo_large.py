"""Large networks for 32 x 32 images: ResNet, ResNeXt and RegNet; DenseNet, DPN and Deep Layer Aggregation.

All map [N, C, 32, 32] to logits [N, num_classes].

ResNet is by K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", arXiv 1512.03385, in the
usual version for CIFAR: a 3 x 3 first convolution without pooling, then the four stages of the ImageNet network.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lockstep.models.blocks import (
    BasicBlock,
    Bottleneck,
    ConvUnit,
    GlobalMean,
    chain,
    conv,
    initialize,
    shortcut,
    staged_net,
    stages,
)

RESNET_WIDTHS = (64, 128, 256, 512)
RESNET_STRIDES = (1, 2, 2, 2)


def _deep_resnet(counts: tuple[int, ...], num_classes: int, in_channels: int) -> nn.Module:
    def block(in_channels: int, width: int, stride: int) -> nn.Module:
        return Bottleneck(in_channels, width, 4 * width, stride)

    layers = stages(block, 64, RESNET_WIDTHS, RESNET_STRIDES, counts, expansion=4)
    return staged_net(conv(in_channels, 64, 3), layers, 4 * RESNET_WIDTHS[-1], num_classes)


def resnet18(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Two basic blocks per stage."""
    layers = stages(BasicBlock, 64, RESNET_WIDTHS, RESNET_STRIDES, (2, 2, 2, 2))
    return staged_net(conv(in_channels, 64, 3), layers, RESNET_WIDTHS[-1], num_classes)


def resnet50(num_classes: int, in_channels: int = 3) -> nn.Module:
    """16 bottlenecks."""
    return _deep_resnet((3, 4, 6, 3), num_classes, in_channels)


def resnet101(num_classes: int, in_channels: int = 3) -> nn.Module:
    """33 bottlenecks."""
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
    """
    layers = stages(PreActBlock, 64, RESNET_WIDTHS, RESNET_STRIDES, (2, 2, 2, 2))
    linear = nn.Linear(RESNET_WIDTHS[-1], num_classes)
    return initialize(chain(conv1=conv(in_channels, 64, 3), **layers, pool=GlobalMean(), linear=linear))


RESNEXT_COUNTS = (3, 3, 3)  # of blocks of 3 convolutions; the first convolution and the linear layer make it 29 layers
RESNEXT_EXPANSION = 2


def _resnext(groups: int, group_width: int, num_classes: int, in_channels: int) -> nn.Module:
    """ResNeXt-29 for 32 x 32 images: bottlenecks whose 3 x 3 convolution is split into groups.

    S. Xie, R. Girshick, P. Dollár, Z. Tu, K. He, "Aggregated Residual Transformations for Deep Neural Networks", arXiv
    1611.05431. As in pytorch-cifar, the first convolution is 1 x 1, and the expansion is 2.
    """

    def block(in_channels: int, width: int, stride: int) -> nn.Module:
        return Bottleneck(in_channels, width, RESNEXT_EXPANSION * width, stride, groups=groups)

    widths = [factor * groups * group_width for factor in (1, 2, 4)]
    layers = stages(block, 64, widths, (1, 2, 2), RESNEXT_COUNTS, RESNEXT_EXPANSION)
    return staged_net(conv(in_channels, 64, 1), layers, widths[-1] * RESNEXT_EXPANSION, num_classes)


def resnext29_32x4d(num_classes: int, in_channels: int = 3) -> nn.Module:
    """32 groups of 4 channels in the first stage."""
    return _resnext(32, 4, num_classes, in_channels)


def resnext29_2x64d(num_classes: int, in_channels: int = 3) -> nn.Module:
    """2 groups of 64 channels in the first stage."""
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

    layers = stages(block, REGNET_STEM, widths, REGNET_STRIDES, depths)
    return staged_net(conv(in_channels, REGNET_STEM, 3), layers, widths[-1], num_classes)


def regnetx_200mf(num_classes: int, in_channels: int = 3) -> nn.Module:
    """RegNetX-200MF, without squeeze-and-excitation."""
    return _regnet((1, 1, 4, 7), (24, 56, 152, 368), 8, 0.0, num_classes, in_channels)


def regnety_400mf(num_classes: int, in_channels: int = 3) -> nn.Module:
    """RegNetY-400MF, with squeeze-and-excitation."""
    return _regnet((1, 2, 7, 12), (32, 64, 160, 384), 16, 0.25, num_classes, in_channels)


DENSENET_COUNTS = (6, 12, 24, 16)
DENSENET_GROWTH = 32


class DenseLayer(nn.Module):
    """Prepends 32 channels to its input, computed by a 1 x 1 (128 channels) and a 3 x 3 convolution."""

    def __init__(self, in_channels: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = conv(in_channels, 4 * DENSENET_GROWTH, 1)
        self.bn2 = nn.BatchNorm2d(4 * DENSENET_GROWTH)
        self.conv2 = conv(4 * DENSENET_GROWTH, DENSENET_GROWTH, 3)

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
    """DenseNet-121 for 32 x 32 images: each layer takes the outputs of all earlier layers of its stage.

    G. Huang, Z. Liu, L. van der Maaten, K. Weinberger, "Densely Connected Convolutional Networks", arXiv 1608.06993,
    with bottlenecks and halving transitions. For small images, the first convolution is 3 x 3, without pooling.
    """
    channels = 2 * DENSENET_GROWTH
    parts: dict[str, nn.Module] = {"conv1": conv(in_channels, channels, 3)}
    for number, count in enumerate(DENSENET_COUNTS, start=1):
        parts[f"dense{number}"] = nn.Sequential(
            *(DenseLayer(channels + layer * DENSENET_GROWTH) for layer in range(count))
        )
        channels += count * DENSENET_GROWTH
        if number < len(DENSENET_COUNTS):
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


# width of the 3 x 3 convolutions, summed channels, growth of the concatenated channels, blocks
DPN_STAGES = ((96, 256, 16, 3), (192, 512, 32, 4), (384, 1024, 24, 20), (768, 2048, 128, 3))
DPN_GROUPS = 32
DPN_STEM = 64


class DualPathBlock(Bottleneck):
    """Adds to the first `summed` channels and appends `growth` more; a stage's first block projects its input."""

    def __init__(self, in_channels: int, width: int, summed: int, growth: int, stride: int, first: bool):
        channels = summed + growth
        beside = shortcut(in_channels, channels, stride) if first else nn.Sequential()
        super().__init__(in_channels, width, channels, stride, groups=DPN_GROUPS, beside=beside)
        self.summed = summed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old, new = self.shortcut(x), self.branch(x)
        paths = [
            old[:, : self.summed] + new[:, : self.summed],
            old[:, self.summed :],
            new[:, self.summed :],
        ]
        return torch.relu(torch.cat(paths, 1))


def dpn92(num_classes: int, in_channels: int = 3) -> nn.Module:
    """DPN-92 for 32 x 32 images: some channels are summed, as in ResNet, and others concatenated, as in DenseNet.

    Y. Chen, J. Li, H. Xiao, X. Jin, S. Yan, J. Feng, "Dual Path Networks", arXiv 1707.01629. For small images, the
    first convolution is 3 x 3, without pooling.
    """
    layers: dict[str, nn.Module] = {}
    channels = DPN_STEM
    for number, (width, summed, growth, count) in enumerate(DPN_STAGES, start=1):
        blocks: list[nn.Module] = []
        for block in range(count):
            stride = 2 if number > 1 and block == 0 else 1
            blocks.append(DualPathBlock(channels, width, summed, growth, stride, first=block == 0))
            channels = summed + (block + 2) * growth
        layers[f"layer{number}"] = nn.Sequential(*blocks)
    return staged_net(conv(in_channels, DPN_STEM, 3), layers, channels, num_classes)


Tree = Callable[[int, int, int, int], nn.Module]
# channels, levels of the tree, stride
DLA_STAGES = ((64, 1, 1), (128, 2, 2), (256, 2, 2), (512, 1, 2))


class Root(nn.Module):
    """Merges feature maps with a 1 x 1 convolution over all their channels."""

    def __init__(self, in_channels: int, channels: int):
        super().__init__()
        self.conv = conv(in_channels, channels, 1)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, maps: list[torch.Tensor]) -> torch.Tensor:
        return torch.relu(self.bn(self.conv(torch.cat(maps, 1))))


class AggregatingTree(nn.Module):
    """Trees of decreasing depth, then two blocks; the root merges their outputs and, above level 1, the input."""

    def __init__(self, in_channels: int, channels: int, level: int, stride: int):
        super().__init__()
        self.root = Root(2 * channels if level == 1 else (level + 2) * channels, channels)
        self.inner = [f"level_{depth}" for depth in range(level - 1, 0, -1)]
        previous, first_stride = in_channels, stride
        for depth, name in zip(range(level - 1, 0, -1), self.inner, strict=True):
            self.add_module(name, AggregatingTree(previous, channels, depth, first_stride))
            previous, first_stride = channels, 1
        # Projects the input to the shape of the other maps.
        self.prev_root = BasicBlock(in_channels, channels, stride) if level > 1 else None
        self.left_node = BasicBlock(previous, channels, first_stride)
        self.right_node = BasicBlock(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [] if self.prev_root is None else [self.prev_root(x)]
        for name in (*self.inner, "left_node", "right_node"):
            x = getattr(self, name)(x)
            maps.append(x)
        merged: torch.Tensor = self.root(maps)
        return merged


class BinaryTree(nn.Module):
    """Two subtrees (blocks at level 1) in sequence, and a root that merges their outputs."""

    def __init__(self, in_channels: int, channels: int, level: int, stride: int):
        super().__init__()
        self.root = Root(2 * channels, channels)
        self.left_tree = self._half(in_channels, channels, level, stride)
        self.right_tree = self._half(channels, channels, level, 1)

    @staticmethod
    def _half(in_channels: int, channels: int, level: int, stride: int) -> nn.Module:
        if level == 1:
            return BasicBlock(in_channels, channels, stride)
        return BinaryTree(in_channels, channels, level - 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.left_tree(x)
        merged: torch.Tensor = self.root([left, self.right_tree(left)])
        return merged


def _dla(tree: Tree, num_classes: int, in_channels: int) -> nn.Module:
    """Deep Layer Aggregation for 32 x 32 images: trees of blocks, whose roots merge the outputs of the subtrees.

    F. Yu, D. Wang, E. Shelhamer, T. Darrell, "Deep Layer Aggregation", arXiv 1707.06484. In `dla`, as in the paper, the
    outer root also gets the outputs of inner trees; in `simpledla`, the root of a binary tree gets only its two halves.
    """
    stages: dict[str, nn.Module] = {}
    previous = 32
    for number, (channels, level, stride) in enumerate(DLA_STAGES, start=3):
        stages[f"layer{number}"] = tree(previous, channels, level, stride)
        previous = channels
    return initialize(
        chain(
            base=ConvUnit(in_channels, 16),
            layer1=ConvUnit(16, 16),
            layer2=ConvUnit(16, 32),
            **stages,
            pool=GlobalMean(),
            linear=nn.Linear(previous, num_classes),
        )
    )


def dla(num_classes: int, in_channels: int = 3) -> nn.Module:
    """The paper's trees."""
    return _dla(AggregatingTree, num_classes, in_channels)


def simpledla(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Binary trees."""
    return _dla(BinaryTree, num_classes, in_channels)
