"""VGG-16 with batch norm and one linear layer, for 32 x 32 images.

K. Simonyan, A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", arXiv 1409.1556: stages
of 3 x 3 convolutions, each followed by max pooling. Five poolings reduce 32 x 32 to one pixel, so that one linear layer
replaces the paper's three.
"""

from __future__ import annotations

from torch import nn

from lockstep.models.blocks import GlobalMean, chain, initialize

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Map [N, C, 32, 32] to logits [N, num_classes]; also works for smaller images, since pooling rounds sizes up."""
    layers: list[nn.Module] = []
    channels = in_channels
    for stage in STAGES:
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return initialize(
        chain(features=nn.Sequential(*layers), pool=GlobalMean(), classifier=nn.Linear(channels, num_classes))
    )
