"""A small convolutional network that learns CIFAR-10 in a few epochs on one GPU.

Its techniques are those of K. Jordan ("94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv 2404.00498) and D. Page
("How to Train Your ResNet", 2018):

- The first layer whitens: it projects 2 x 2 patches onto the eigenvectors of the training patches' covariance, each
  divided by its standard deviation, and onto their negatives. `whiten` computes these weights, which are frozen; only
  the layer's bias is trained.
- Pooling comes early, and every later convolution starts as the identity on its input channels.
- Norms have no scale, and their shifts have 64 times the learning rate of the weights.
- The logits are scaled down, so that the loss starts small and flat.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.models.blocks import chain, conv

PATCH = 2
WIDTHS = (64, 256, 256)
LOGIT_SCALE = 1 / 9
SHIFT_SCALE = 8.0  # scales both the shift and its gradient: 64 times the learning rate
LEAST_VARIANCE = 5e-4  # added to a component's variance, so that noise is not scaled up to 1
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


def build(num_classes: int, in_channels: int = 3, widths: tuple[int, int, int] = WIDTHS) -> nn.Module:
    """Build a network from [N, C, 32, 32] to logits [N, num_classes]; `widths` are the channels of the three blocks.

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
    directions = (vectors / (variances + LEAST_VARIANCE).sqrt()).T.flip(0).reshape(-1, channels, PATCH, PATCH)
    weight = layer.get_parameter("weight")
    weight.copy_(torch.cat([directions, -directions]))
