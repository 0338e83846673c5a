"""The size of training images by epoch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from lockstep.data.sets import InputSpec
from lockstep.data.transforms import check_sizes, resize, side_at
from lockstep.errors import ConfigError


def test_epoch_has_the_side_of_the_last_pair_started() -> None:
    sizes = {0: 128, 3: 160, 30: 224}
    found = [side_at(sizes, epoch) for epoch in (0, 2, 3, 29, 30, 89)]
    assert found == [128, 128, 160, 160, 224, 224]
    assert side_at(sizes, None) is None
    assert side_at({}, 5) is None


@pytest.mark.parametrize(
    ("shape", "side", "expected"), [((8, 8), 6, (6, 6)), ((8, 12), 4, (4, 6)), ((12, 8), 10, (15, 10))]
)
def test_images_keep_their_aspect_and_are_smoothed_first(
    shape: tuple[int, int], side: int, expected: tuple[int, int]
) -> None:
    images = torch.randint(0, 256, (3, 2, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    resized = resize(images, side)
    assert (resized.dtype, resized.shape) == (torch.uint8, (3, 2, *expected))
    slow = F.interpolate(images.double(), expected, mode="bilinear", antialias=True)
    assert (resized.double() - slow).abs().max() <= 1


def test_images_of_that_side_and_without_a_side_are_left_alone() -> None:
    images = torch.zeros(1, 1, 4, 6, dtype=torch.uint8)
    assert resize(images, None) is images
    assert resize(images, 4) is images


def test_sizes_that_a_model_cannot_take_are_refused() -> None:
    spec = InputSpec(1, 8, 8, (0.5,), (0.5,))
    fixed = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3)).train()
    before = [tensor.clone() for tensor in fixed.state_dict().values()]
    check_sizes(fixed, {0: 8}, spec)
    assert fixed.training
    assert all(torch.equal(*pair) for pair in zip(fixed.state_dict().values(), before, strict=True))
    with pytest.raises(ConfigError, match="--progressive-sizes: this model does not accept images of 6 pixels"):
        check_sizes(fixed, {0: 6, 1: 8}, spec)
    check_sizes(nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1)), {0: 6, 1: 8}, spec)


def test_error_of_a_model_is_reported_without_parameters_too() -> None:
    vit = models.VisionTransformer(16, 8, num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8, num_classes=2)
    spec = InputSpec(3, 16, 16, (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(ConfigError, match=r"does not accept images of 8 pixels \(Wrong image height"):
        check_sizes(vit, {0: 8, 1: 16}, spec)
    assert vit.training
    check_sizes(nn.Flatten(), {0: 8}, spec)
    frozen = nn.Sequential(nn.BatchNorm2d(3).eval())
    check_sizes(frozen, {0: 8}, spec)
    assert (frozen.training, frozen[0].training) == (True, False)
