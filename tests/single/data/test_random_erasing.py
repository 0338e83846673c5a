"""Random erasing on batches: torchvision's rectangles, each image by its own draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import RandomErasing

from lockstep.data.random_draws import Draws
from lockstep.data.transforms import ERASING_ATTEMPTS, erase_


def _images(count: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


def _draws(count: int, epoch: int = 0) -> Draws:
    return Draws(1, epoch, np.arange(count, dtype=np.int64))


def _rescale(uniform: float, low: float, high: float) -> float:
    return low + (high - low) * uniform


@pytest.mark.parametrize(("height", "width"), [(24, 32), (32, 12), (5, 40), (3, 3)])
def test_with_its_draws_torchvisions_transform_erases_the_same(
    monkeypatch: pytest.MonkeyPatch, height: int, width: int
) -> None:
    images, draws = _images(100, height, width), _draws(100)
    ours = erase_(images.clone(), draws, 1.0)
    peer = RandomErasing(p=1.0)
    uniforms = {
        name: draws.uniform(f"erasing {name}")
        for name in ("row", "column", *(f"{kind} {k}" for kind in ("area", "ratio") for k in range(ERASING_ATTEMPTS)))
    }
    for sample in range(100):
        shapes = iter([uniforms[f"{kind} {k}"][sample] for k in range(ERASING_ATTEMPTS) for kind in ("area", "ratio")])
        places = iter([uniforms["row"][sample], uniforms["column"][sample]])

        def uniform_(tensor: Any, low: float, high: float, shapes: Iterator[float] = shapes) -> torch.Tensor:
            return tensor.fill_(_rescale(next(shapes), low, high))

        def randint(low: int, high: int, size: Any, places: Iterator[float] = places) -> torch.Tensor:
            return torch.tensor([low + math.floor(next(places) * (high - low))])

        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "uniform_", uniform_)
            patched.setattr(torch, "randint", randint)
            params = peer.make_params([images[sample]])
        assert torch.equal(ours[sample], peer.transform(images[sample], params))
    assert (ours == 0).any()


def test_an_image_is_erased_the_same_whatever_batch_it_is_in() -> None:
    images = _images(64, 16, 24)
    whole = erase_(images.clone(), _draws(64), 0.5)
    parts = [
        erase_(images[part].clone(), Draws(1, 0, part), 0.5)
        for part in np.array_split(np.arange(64, dtype=np.int64), 5)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(erase_(images.clone(), _draws(64, epoch=1), 0.5), whole)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_that_share_of_the_images_is_erased_in_2_to_33_percent(share: float) -> None:
    erased = (erase_(torch.ones(4000, 1, 32, 32), _draws(4000), share) == 0).float().mean((1, 2, 3))
    assert float((erased > 0).float().mean()) == pytest.approx(share, abs=0.03)
    for part in erased[erased > 0].tolist():
        assert 0.015 < part < 0.36  # sides are rounded to pixels


def test_channels_last_and_half_precision_are_erased_alike() -> None:
    images = _images(16, 12, 12)
    plain = erase_(images.clone(), _draws(16), 1.0)
    theirs = erase_(images.to(torch.bfloat16, memory_format=torch.channels_last), _draws(16), 1.0)
    assert torch.equal(theirs == 0, plain == 0)
