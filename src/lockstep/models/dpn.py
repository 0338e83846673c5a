"""DPN-92 for 32 x 32 images: some channels are summed, as in ResNet, and others concatenated, as in DenseNet.

Y. Chen, J. Li, H. Xiao, X. Jin, S. Yan, J. Feng, "Dual Path Networks", arXiv 1707.01629. For small images, the first
convolution is 3 x 3, without pooling.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.models.blocks import Bottleneck, conv, shortcut, staged_net

# width of the 3 x 3 convolutions, summed channels, growth of the concatenated channels, blocks
STAGES = ((96, 256, 16, 3), (192, 512, 32, 4), (384, 1024, 24, 20), (768, 2048, 128, 3))
GROUPS = 32
STEM = 64


class DualPathBlock(Bottleneck):
    """Adds to the first `summed` channels and appends `growth` more; a stage's first block projects its input."""

    def __init__(self, in_channels: int, width: int, summed: int, growth: int, stride: int, first: bool):
        channels = summed + growth
        beside = shortcut(in_channels, channels, stride) if first else nn.Sequential()
        super().__init__(in_channels, width, channels, stride, groups=GROUPS, beside=beside)
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
    """Map [N, C, 32, 32] to logits [N, num_classes]."""
    layers: dict[str, nn.Module] = {}
    channels = STEM
    for number, (width, summed, growth, count) in enumerate(STAGES, start=1):
        blocks: list[nn.Module] = []
        for block in range(count):
            stride = 2 if number > 1 and block == 0 else 1
            blocks.append(DualPathBlock(channels, width, summed, growth, stride, first=block == 0))
            channels = summed + (block + 2) * growth
        layers[f"layer{number}"] = nn.Sequential(*blocks)
    return staged_net(conv(in_channels, STEM, 3), layers, channels, num_classes)
