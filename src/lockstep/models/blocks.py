"""Building blocks that several families share, and their initialization.

A network of the zoo is a chain of named modules. The names are pytorch-cifar's, so that its checkpoints load;
they differ slightly between families. Modules without weights do not appear in checkpoints.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn


class ConvUnit(nn.Sequential):
    """Convolution, batch norm (S. Ioffe, C. Szegedy, arXiv 1502.03167), ReLU; the norm's shift is the only bias."""

    def __init__(self, in_channels: int, channels: int, kernel: int = 3, stride: int = 1):
        super().__init__(conv(in_channels, channels, kernel, stride), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class GlobalMean(nn.Module):
    """Maps [N, C, H, W] to each channel's mean, [N, C]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (K. He et al., arXiv 1512.03385)."""

    def __init__(self, in_channels: int, channels: int, stride: int = 1):
        super().__init__()
        self.conv1 = conv(in_channels, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = shortcut(in_channels, channels, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate, computed from the means of all channels (J. Hu et al., arXiv 1709.01507)."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.se1 = nn.Conv2d(channels, width, 1)
        self.se2 = nn.Conv2d(width, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights: torch.Tensor = self.se2(torch.relu(self.se1(x.mean((2, 3), keepdim=True)))).sigmoid()
        return x * weights


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions of `width`, `width` and `channels` channels, and a shortcut.

    Args:
        groups: Groups of the 3 x 3 convolution.
        squeeze: Width of the squeeze-and-excitation after it; 0 for none.
        beside: The shortcut module; by default the result of `shortcut`.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        channels: int,
        stride: int = 1,
        *,
        groups: int = 1,
        squeeze: int = 0,
        beside: nn.Module | None = None,
    ):
        super().__init__()
        self.conv1 = conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride, groups)
        self.bn2 = nn.BatchNorm2d(width)
        self.se = SqueezeExcite(width, squeeze) if squeeze else nn.Identity()
        self.conv3 = conv(width, channels, 1)
        self.bn3 = nn.BatchNorm2d(channels)
        self.shortcut = shortcut(in_channels, channels, stride) if beside is None else beside

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the convolutions, without the shortcut."""
        out = torch.relu(self.bn1(self.conv1(x)))
        out = torch.relu(self.bn2(self.conv2(out)))
        result: torch.Tensor = self.bn3(self.conv3(self.se(out)))
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


def conv(in_channels: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a convolution with "same" padding, and without bias, which a following norm would cancel."""
    return nn.Conv2d(in_channels, channels, kernel, stride, padding=(kernel - 1) // 2, groups=groups, bias=False)


def shortcut(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    """Return an identity if the shape does not change, else a 1 x 1 convolution and a norm."""
    if stride == 1 and in_channels == channels:
        return nn.Sequential()
    return nn.Sequential(conv(in_channels, channels, 1, stride), nn.BatchNorm2d(channels))


def stages(
    block: Callable[[int, int, int], nn.Module],
    in_channels: int,
    widths: Sequence[int],
    strides: Sequence[int],
    counts: Sequence[int],
    expansion: int = 1,
) -> dict[str, nn.Module]:
    """Return stages of blocks, named layer1, layer2, ...

    Args:
        block: Builds a block from input channels, width and stride, with `expansion * width` output channels.
        in_channels: Input channels of the first block.
        strides: Of the first block of each stage.
        counts: The number of blocks of each stage.
    """
    layers: dict[str, nn.Module] = {}
    for number, (width, stride, count) in enumerate(zip(widths, strides, counts, strict=True), start=1):
        blocks = [block(in_channels, width, stride)]
        blocks += [block(expansion * width, width, 1) for _ in range(count - 1)]
        layers[f"layer{number}"] = nn.Sequential(*blocks)
        in_channels = expansion * width
    return layers


def staged_net(first: nn.Conv2d, layers: Mapping[str, nn.Module], channels: int, num_classes: int) -> nn.Sequential:
    """Return a network of a first convolution, stages, global mean pooling of `channels`, and a linear layer."""
    return initialize(
        chain(
            conv1=first,
            bn1=nn.BatchNorm2d(first.out_channels),
            relu=nn.ReLU(inplace=True),
            **layers,
            pool=GlobalMean(),
            linear=nn.Linear(channels, num_classes),
        )
    )


def chain(**parts: nn.Module) -> nn.Sequential:
    """Return nn.Sequential of named modules."""
    return nn.Sequential(OrderedDict(parts))


def initialize(model: nn.Sequential) -> nn.Sequential:
    """Set convolutions to He's normal initialization by fan-out, and their biases to 0; leave other layers alone.

    Fan-out preserves the magnitude of gradients through ReLUs in the backward pass (K. He et al., arXiv 1502.01852);
    batch norms do so in the forward pass. Fan-out is counted per group: otherwise, the initial weights of a depthwise
    convolution would be too small, by a factor of the square root of its channels.
    """
    for module in model.modules():
        # On the meta device, normal_ would import torch._dynamo, which takes 4 s.
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
            nn.init.normal_(module.weight, 0.0, math.sqrt(2 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
