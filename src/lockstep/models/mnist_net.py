"""A small convolutional network for 28 x 28 grayscale digits.

A 5 x 5 convolution with stride 2 halves the resolution; one more runs at 14 x 14 and two at 7 x 7. The last feature
map, pooled to 3 x 3, is flattened for the classifier, because the position of a stroke distinguishes digits. The
architecture follows Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998.
"""

from __future__ import annotations

from torch import nn

from lockstep.models.blocks import ConvUnit


def build(num_classes: int, in_channels: int = 1, width: int = 16) -> nn.Module:
    """Map [N, C, 28, 28] to logits [N, num_classes]; stages have 1, 2 and 4 times `width` channels."""
    return nn.Sequential(
        ConvUnit(in_channels, width, kernel=5, stride=2),
        ConvUnit(width, 2 * width),
        nn.MaxPool2d(2),
        ConvUnit(2 * width, 4 * width),
        ConvUnit(4 * width, 4 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width * 3 * 3, num_classes),
    )
