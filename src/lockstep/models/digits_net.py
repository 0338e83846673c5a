"""A small convolutional network for 8 x 8 grayscale digits, without batch statistics.

It has neither batch norm nor dropout, so the output for an image does not depend on other images or random numbers, and
splitting a batch over workers does not change the result. It uses group norm (Y. Wu, K. He, arXiv 1803.08494), which
normalizes within each image.
"""

from __future__ import annotations

from torch import nn

GROUPS = 8


def _conv_unit(in_channels: int, channels: int) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
    return [convolution, nn.GroupNorm(GROUPS, channels), nn.ReLU(inplace=True)]


def build(num_classes: int, in_channels: int = 1, width: int = 32) -> nn.Module:
    """Map [N, C, 8, 8] to logits [N, num_classes]; stages have 1, 2 and 4 times `width` (a multiple of 8) channels."""
    return nn.Sequential(
        *_conv_unit(in_channels, width),
        *_conv_unit(width, 2 * width),
        nn.MaxPool2d(2),
        *_conv_unit(2 * width, 4 * width),
        nn.Flatten(),
        nn.Linear(4 * width * 4 * 4, num_classes),
    )
