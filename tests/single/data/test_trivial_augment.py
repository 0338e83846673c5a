"""TrivialAugment on batches: each image by its own draws; its operations are compared in test_rand_augment."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import TrivialAugmentWide

from lockstep.data.policies import SIGNED, TRIVIAL_CHANGES, trivial_augment_
from lockstep.data.random_draws import Draws


def _images(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def _draws(count: int, epoch: int = 0) -> Draws:
    return Draws(1, epoch, np.arange(count, dtype=np.int64))


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_changed_the_same_whatever_batch_it_is_in(channels: int) -> None:
    images = _images(64, channels, 16, 24)
    whole = trivial_augment_(images.clone(), _draws(64))
    assert (whole.dtype, whole.shape) == (images.dtype, images.shape)
    assert (whole != images).flatten(1).any(1).float().mean() > 0.7
    parts = [
        trivial_augment_(images[part].clone(), Draws(1, 0, part))
        for part in np.array_split(np.arange(64, dtype=np.int64), 5)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(trivial_augment_(images.clone(), _draws(64, epoch=1)), whole)


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
    monkeypatch.setattr(torch, "linspace", partial(torch.linspace, dtype=torch.float64))  # else off by a rounding
    for sample in range(60):
        integers = iter([numbers[operation[sample]], magnitude[sample]])
        with monkeypatch.context() as patched:
            patched.setattr(torch, "randint", lambda *a, integers=integers, **k: torch.tensor(next(integers)))
            patched.setattr(torch, "rand", lambda *a, sample=sample, **k: torch.tensor(sign[sample]))
            expected = theirs(images[sample])
        apart = (ours[sample].int() - expected.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 0.01
