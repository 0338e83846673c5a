"""Small and plain networks: digits-net, mnist-net, cifar-small, cifar10-fast, VGG-16, MobileNetV2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.models.blocks import Bottleneck, ConvUnit, GlobalMean, chain, conv, initialize, shortcut

NORM_GROUPS = 8


def _conv_unit(in_channels: int, channels: int) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
    return [convolution, nn.GroupNorm(NORM_GROUPS, channels), nn.ReLU(inplace=True)]


def digits_net(num_classes: int, in_channels: int = 1, width: int = 32) -> nn.Module:
    """A small convolutional network for 8 x 8 grayscale digits, without batch statistics.

    It has neither batch norm nor dropout, so the output for an image does not depend on other images or random numbers,
    and splitting a batch over workers does not change the result. It uses group norm (Y. Wu, K. He, arXiv 1803.08494),
    which normalizes within each image.

    Map [N, C, 8, 8] to logits [N, num_classes]; stages have 1, 2 and 4 times `width` (a multiple of 8) channels.
    """
    return nn.Sequential(
        *_conv_unit(in_channels, width),
        *_conv_unit(width, 2 * width),
        nn.MaxPool2d(2),
        *_conv_unit(2 * width, 4 * width),
        nn.Flatten(),
        nn.Linear(4 * width * 4 * 4, num_classes),
    )


def mnist_net(num_classes: int, in_channels: int = 1, width: int = 16) -> nn.Module:
    """A small convolutional network for 28 x 28 grayscale digits.

    A 5 x 5 convolution with stride 2 halves the resolution; one more runs at 14 x 14 and two at 7 x 7. The last feature
    map, pooled to 3 x 3, is flattened for the classifier, because the position of a stroke distinguishes digits. The
    architecture follows Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998.

    Map [N, C, 28, 28] to logits [N, num_classes]; stages have 1, 2 and 4 times `width` channels.
    """
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


class Residual(nn.Module):
    """Adds the output of two convolutions to their input."""

    def __init__(self, channels: int):
        super().__init__()
        self.branch = nn.Sequential(ConvUnit(channels, channels), ConvUnit(channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.branch(x)
        return out


def cifar_small(
    num_classes: int, in_channels: int = 3, widths: tuple[int, int, int, int] = (32, 64, 96, 128)
) -> nn.Module:
    """A small residual network for 32 x 32 color images, sized for CPUs.

    A 4 x 4 convolution with stride 2 comes first, so that nearly all computation is at 16 x 16 and 8 x 8. There is one
    residual block (K. He et al., arXiv 1512.03385) at 8 x 8, and global max pooling before the classifier. The network
    is a smaller version of D. Page's ResNet-9 ("How to Train Your ResNet", 2018).

    Map [N, C, 32, 32] to logits [N, num_classes]; `widths` are the channels of the four stages.
    """
    stem, early, middle, late = widths
    return nn.Sequential(
        ConvUnit(in_channels, stem, kernel=4, stride=2),
        ConvUnit(stem, early),
        nn.MaxPool2d(2),
        ConvUnit(early, middle),
        Residual(middle),
        nn.MaxPool2d(2),
        ConvUnit(middle, late),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(late, num_classes),
    )


PATCH = 2
WIDTHS = (64, 256, 256)
LOGIT_SCALE = 1 / 9
SHIFT_SCALE = 8.0  # scales both the shift and its gradient: 64 times the learning rate
MIN_VARIANCE = 5e-4  # added to a component's variance, so that noise is not scaled up to 1
CHUNK = 500  # images whose patches are in memory at once, 50 MB


class ShiftedGelu(nn.Module):
    """GELU (D. Hendrycks, K. Gimpel, arXiv 1606.08415) after adding a shift per channel with a scaled learning rate."""

    def __init__(self, channels: int):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + SHIFT_SCALE * self.shift.to(x.dtype).view(-1, 1, 1))


class ScaledLinear(nn.Linear):
    """A linear layer without bias that scales down its output."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return LOGIT_SCALE * super().forward(x)


class GlobalMaximum(nn.Module):
    """Maps [N, C, H, W] to each channel's maximum, [N, C]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not amax: compiled in bf16, its backward pass compares unrounded numbers with their rounded maximum. None is
        # equal, and dividing by their number gives NaN.
        return x.flatten(2).max(2).values


def _identity_conv(in_channels: int, channels: int) -> nn.Conv2d:
    layer = conv(in_channels, channels, 3)
    if not layer.weight.is_meta:
        nn.init.dirac_(layer.weight[:in_channels].detach())
    return layer


def _norm(channels: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(channels, affine=False, momentum=0.4), ShiftedGelu(channels))


def _block(in_channels: int, channels: int) -> nn.Module:
    """Two convolutions, with pooling after the first."""
    return nn.Sequential(
        _identity_conv(in_channels, channels),
        nn.MaxPool2d(2),
        _norm(channels),
        _identity_conv(channels, channels),
        _norm(channels),
    )


def cifar10_fast(num_classes: int, in_channels: int = 3, widths: tuple[int, int, int] = WIDTHS) -> nn.Module:
    """A small convolutional network that learns CIFAR-10 in a few epochs on one GPU.

    Its techniques are those of K. Jordan ("94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv 2404.00498) and D.
    Page ("How to Train Your ResNet", 2018):

    - The first layer whitens: it projects 2 x 2 patches onto the eigenvectors of the training patches' covariance, each
      divided by its standard deviation, and onto their negatives. `whiten` computes these weights, which are frozen;
      only the layer's bias is trained.
    - Pooling comes early, and every later convolution starts as the identity on its input channels.
    - Norms have no scale, and their shifts have 64 times the learning rate of the weights.
    - The logits are scaled down, so that the loss starts small and flat.

    Build a network from [N, C, 32, 32] to logits [N, num_classes]; `widths` are the channels of the three blocks.

    The first layer has random weights until `whiten` is called.
    """
    first = nn.Conv2d(in_channels, 2 * in_channels * PATCH**2, PATCH)
    first.weight.requires_grad_(False)
    if first.bias is not None and not first.bias.is_meta:
        nn.init.zeros_(first.bias)
    early, middle, late = widths
    return chain(
        whiten=first,
        gelu=nn.GELU(),
        block1=_block(first.out_channels, early),
        block2=_block(early, middle),
        block3=_block(middle, late),
        pool=GlobalMaximum(),
        linear=ScaledLinear(late, num_classes),
    )


@torch.no_grad()
def whiten(model: nn.Module, images: torch.Tensor) -> None:
    """Compute the first layer's weights from normalized training images, floating-point [N, C, H, W]."""
    layer = model.get_submodule("whiten")
    channels = images.shape[1]
    size = channels * PATCH**2
    total = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    for some in images.split(CHUNK):
        patches = some.double().unfold(2, PATCH, 1).unfold(3, PATCH, 1)  # [N, C, H - 1, W - 1, PATCH, PATCH]
        rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, size)
        total += rows.T @ rows / len(rows) * (len(some) / len(images))
    variances, vectors = torch.linalg.eigh(total)  # without subtracting the mean, which normalization makes 0
    directions = (vectors / (variances + MIN_VARIANCE).sqrt()).T.flip(0).reshape(-1, channels, PATCH, PATCH)
    weight = layer.get_parameter("weight")
    weight.copy_(torch.cat([directions, -directions]))


VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(num_classes: int, in_channels: int = 3) -> nn.Module:
    """VGG-16 with batch norm and one linear layer, for 32 x 32 images.

    K. Simonyan, A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", arXiv 1409.1556:
    stages of 3 x 3 convolutions, each followed by max pooling. Five poolings reduce 32 x 32 to one pixel, so that one
    linear layer replaces the paper's three.

    Map [N, C, 32, 32] to logits [N, num_classes]; also works for smaller images, since pooling rounds sizes up.
    """
    layers: list[nn.Module] = []
    channels = in_channels
    for stage in VGG_STAGES:
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return initialize(
        chain(features=nn.Sequential(*layers), pool=GlobalMean(), classifier=nn.Linear(channels, num_classes))
    )


# expansion, channels, blocks, stride of the first block
MOBILENET_GROUPS = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM, LAST = 32, 1280


class InvertedResidual(Bottleneck):
    """A bottleneck with `expansion` times the channels inside, a depthwise 3 x 3 convolution and no final ReLU."""

    def __init__(self, in_channels: int, channels: int, expansion: int, stride: int):
        width = expansion * in_channels
        beside = shortcut(in_channels, channels, stride) if stride == 1 else nn.Sequential()
        super().__init__(in_channels, width, channels, stride, groups=width, beside=beside)
        self.adds = stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.branch(x)
        return out + self.shortcut(x) if self.adds else out


def mobilenetv2(num_classes: int, in_channels: int = 3) -> nn.Module:
    """MobileNetV2 for 32 x 32 images.

    M. Sandler, A. Howard, M. Zhu, A. Zhmoginov, L.-C. Chen, "MobileNetV2: Inverted Residuals and Linear Bottlenecks",
    arXiv 1801.04381. For small images, the first convolution and the second group have stride 1. As in pytorch-cifar,
    every block with stride 1 has a shortcut, with a 1 x 1 convolution if the number of channels changes, and ReLU
    replaces ReLU6.

    Map [N, C, 32, 32] to logits [N, num_classes].
    """
    blocks: list[nn.Module] = []
    channels = STEM
    for expansion, width, count, stride in MOBILENET_GROUPS:
        for number in range(count):
            blocks.append(InvertedResidual(channels, width, expansion, stride if number == 0 else 1))
            channels = width
    return initialize(
        chain(
            conv1=conv(in_channels, STEM, 3),
            bn1=nn.BatchNorm2d(STEM),
            relu1=nn.ReLU(inplace=True),
            layers=nn.Sequential(*blocks),
            conv2=conv(channels, LAST, 1),
            bn2=nn.BatchNorm2d(LAST),
            relu2=nn.ReLU(inplace=True),
            pool=GlobalMean(),
            linear=nn.Linear(LAST, num_classes),
        )
    )
