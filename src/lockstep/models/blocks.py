"""The building block that most convolutional networks share."""

from __future__ import annotations

from torch import nn


class ConvUnit(nn.Sequential):
    """Convolution, batch norm (S. Ioffe, C. Szegedy, arXiv 1502.03167), ReLU; the norm's shift is the only bias."""

    def __init__(self, in_channels: int, channels: int, kernel: int = 3, stride: int = 1):
        super().__init__(
            nn.Conv2d(in_channels, channels, kernel, stride, padding=(kernel - 1) // 2, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
