"""RandAugment and TrivialAugment: operations against torchvision's, and each image by its own draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import RandAugment, TrivialAugmentWide

from lockstep.data.auto_augment import RAND_CHANGES, SIGNED, TRIVIAL_CHANGES, Change, rand_augment_, trivial_augment_
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


@pytest.fixture
def _exact_linspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchvision's magnitudes not be off by a rounding."""
    monkeypatch.setattr(torch, "linspace", partial(torch.linspace, dtype=torch.float64))


@pytest.mark.usefixtures("_exact_linspace")
@pytest.mark.parametrize("name", RAND_CHANGES)
@pytest.mark.parametrize("magnitude", [0, 9, 17, 30])
@pytest.mark.parametrize(("ours", "theirs"), [(RAND_CHANGES, RandAugment), (TRIVIAL_CHANGES, TrivialAugmentWide)])
def test_each_operation_is_torchvisions(ours: Mapping[str, Change], theirs: Any, name: str, magnitude: int) -> None:
    images = _images(3, 3, 51, 64)
    peer = theirs(interpolation=InterpolationMode.BILINEAR)
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


def test_operations_signs_and_strengths_come_up_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    strengths: Counter[int] = Counter()

    def note(name: str, images: torch.Tensor, strength: float) -> torch.Tensor:
        seen[name] += len(images)
        strengths[round(30 * strength)] += len(images)
        return images

    for name in TRIVIAL_CHANGES:
        monkeypatch.setitem(TRIVIAL_CHANGES, name, lambda images, strength, name=name: note(name, images, strength))
    trivial_augment_(_images(14_000, 3, 2, 2), _draws(14_000))
    assert set(seen) == TRIVIAL_CHANGES.keys() - {"identity"}
    assert all(900 < count < 1100 for count in seen.values())
    assert set(strengths) == set(range(-30, 31))  # both signs of all 31
    assert sum(count for strength, count in strengths.items() if strength < 0) == pytest.approx(
        len(SIGNED) * 1000 * 30 / 31 / 2, rel=0.1
    )


@pytest.mark.usefixtures("_exact_linspace")
def test_torchvisions_transform_with_equal_draws_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its three draws are replaced by ours: of the operation, of the strength, of the sign."""
    images, draws = _images(60, 3, 40, 48), _draws(60)
    order = {name: number for number, name in enumerate(TrivialAugmentWide._AUGMENTATION_SPACE)}
    alias = {"saturation": "color"}
    numbers = [order[next(k for k in order if k.lower() == alias.get(n, n).replace(" ", ""))] for n in TRIVIAL_CHANGES]
    operation = draws.integers("trivial augment", 0, len(TRIVIAL_CHANGES) - 1)
    magnitude = draws.integers("trivial augment magnitude", 0, 30)
    sign = draws.uniform("trivial augment sign")
    ours = trivial_augment_(images.clone(), draws)
    theirs = TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR)
    for sample in range(60):
        integers = iter([numbers[operation[sample]], magnitude[sample]])
        with monkeypatch.context() as patched:
            patched.setattr(torch, "randint", lambda *a, integers=integers, **k: torch.tensor(next(integers)))
            patched.setattr(torch, "rand", lambda *a, sample=sample, **k: torch.tensor(sign[sample]))
            expected = theirs(images[sample])
        apart = (ours[sample].int() - expected.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 0.01
