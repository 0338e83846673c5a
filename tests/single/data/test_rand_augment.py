"""RandAugment on batches: each operation against torchvision's, and each image by its own draws."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import RandAugment, TrivialAugmentWide

from lockstep.data.policies import RAND_CHANGES, SIGNED, TRIVIAL_CHANGES, Change, rand_augment_
from lockstep.data.random_draws import Draws

# Our name, torchvision's.
PEERS = {
    "identity": "Identity",
    "shear x": "ShearX",
    "shear y": "ShearY",
    "translate x": "TranslateX",
    "translate y": "TranslateY",
    "rotate": "Rotate",
    "brightness": "Brightness",
    "contrast": "Contrast",
    "sharpness": "Sharpness",
    "saturation": "Color",
    "posterize": "Posterize",
    "solarize": "Solarize",
    "autocontrast": "AutoContrast",
    "equalize": "Equalize",
}


def _images(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def _draws(count: int, epoch: int = 0) -> Draws:
    return Draws(1, epoch, np.arange(count, dtype=np.int64))


@pytest.mark.parametrize("name", RAND_CHANGES)
@pytest.mark.parametrize("magnitude", [0, 9, 17, 30])
@pytest.mark.parametrize(("ours", "theirs"), [(RAND_CHANGES, RandAugment), (TRIVIAL_CHANGES, TrivialAugmentWide)])
def test_each_operation_is_torchvisions(
    monkeypatch: pytest.MonkeyPatch, ours: Mapping[str, Change], theirs: Any, name: str, magnitude: int
) -> None:
    images = _images(3, 3, 51, 64)
    peer = theirs(interpolation=InterpolationMode.BILINEAR)
    monkeypatch.setattr(torch, "linspace", partial(torch.linspace, dtype=torch.float64))  # else off by a rounding
    values, signed = theirs._AUGMENTATION_SPACE[PEERS[name]]
    values = values(31, 51, 64)
    value = 0.0 if values is None else float(values[magnitude])
    assert signed == (name in SIGNED)
    for sign in (1, -1) if signed else (1,):
        changed = ours[name](images, sign * magnitude / 30)
        assert (changed.dtype, changed.shape) == (images.dtype, images.shape)
        for mine, image in zip(changed, images, strict=True):
            expected = peer._apply_image_or_video_transform(
                image, PEERS[name], sign * value, InterpolationMode.BILINEAR, {torch.Tensor: None}
            )
            apart = (mine.int() - expected.int()).abs()  # torchvision keeps its magnitudes in single precision
            assert apart.max() <= 1
            assert (apart > 0).float().mean() < 0.01


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_changed_the_same_whatever_batch_it_is_in(channels: int) -> None:
    images = _images(64, channels, 16, 24)
    whole = rand_augment_(images.clone(), _draws(64), 2, 9)
    assert (whole.dtype, whole.shape) == (images.dtype, images.shape)
    assert (whole != images).flatten(1).any(1).float().mean() > 0.8
    parts = [
        rand_augment_(images[part].clone(), Draws(1, 0, part), 2, 9)
        for part in np.array_split(np.arange(64, dtype=np.int64), 5)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(rand_augment_(images.clone(), _draws(64, epoch=1), 2, 9), whole)


def test_every_operation_and_sign_comes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, float]] = set()
    for name in RAND_CHANGES:
        monkeypatch.setitem(
            RAND_CHANGES, name, lambda images, strength, name=name: (seen.add((name, strength)), images)[1]
        )
    rand_augment_(_images(500, 3, 4, 4), _draws(500), 1, 15)
    expected = {(name, sign * 0.5) for name in RAND_CHANGES for sign in ((1, -1) if name in SIGNED else (1,))}
    assert seen == expected - {("identity", 0.5)}


def test_images_in_channels_last_order_change_alike() -> None:
    images = _images(32, 3, 12, 12)
    theirs = rand_augment_(images.to(memory_format=torch.channels_last), _draws(32), 2, 20)
    assert torch.equal(theirs, rand_augment_(images.clone(), _draws(32), 2, 20))
