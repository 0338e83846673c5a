"""Deep Layer Aggregation for 32 x 32 images: trees of blocks, whose roots merge the outputs of the subtrees.

F. Yu, D. Wang, E. Shelhamer, T. Darrell, "Deep Layer Aggregation", arXiv 1707.06484. In `dla`, as in the paper, the
outer root also gets the outputs of inner trees; in `simpledla`, the root of a binary tree gets only its two halves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lockstep.models.blocks import BasicBlock, ConvUnit, GlobalMean, chain, conv, initialize

Tree = Callable[[int, int, int, int], nn.Module]
# channels, levels of the tree, stride
STAGES = ((64, 1, 1), (128, 2, 2), (256, 2, 2), (512, 1, 2))


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


def _build(tree: Tree, num_classes: int, in_channels: int) -> nn.Module:
    stages: dict[str, nn.Module] = {}
    previous = 32
    for number, (channels, level, stride) in enumerate(STAGES, start=3):
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
    """The paper's trees; maps [N, C, 32, 32] to logits [N, num_classes]."""
    return _build(AggregatingTree, num_classes, in_channels)


def simpledla(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Binary trees; maps [N, C, 32, 32] to logits [N, num_classes]."""
    return _build(BinaryTree, num_classes, in_channels)
