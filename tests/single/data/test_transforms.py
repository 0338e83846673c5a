"""Random crops, shifts and warps, erasing, and image sizes that grow during training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from distributions import distance, largest_distance
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.functional import affine
from torchvision.transforms.v2 import RandomErasing

from lockstep.config.schema import AugmentConfig
from lockstep.data import transforms
from lockstep.data.random_draws import Draws
from lockstep.data.transforms import ATTEMPTS, RandomCrop, erase_

DRAWS = 4000
RATIO = (3 / 4, 4 / 3)


def _boxes(width: int, height: int, min_crop: float, draws: int = DRAWS) -> npt.NDArray[np.float64]:
    crops = RandomCrop(Draws(0, 0, np.arange(draws)), min_crop)
    return np.array([crops.box(position, width, height) for position in range(draws)])


def _torchvisions_boxes(width: int, height: int, min_crop: float, draws: int = DRAWS) -> npt.NDArray[np.float64]:
    image = torch.empty(1, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rows = [RandomResizedCrop.get_params(image, [min_crop, 1.0], list(RATIO)) for _ in range(draws)]
    return np.array([(left, top, left + wide, top + high) for top, left, high, wide in rows], dtype=np.float64)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (100, 1836), (1, 1), (3, 2), (900, 7)])
@pytest.mark.parametrize("min_crop", [0.08, 0.35, 1.0])
def test_boxes_lie_inside_the_image_and_are_not_empty(width: int, height: int, min_crop: float) -> None:
    left, top, right, bottom = _boxes(width, height, min_crop, 500).T
    assert left.min() >= 0
    assert top.min() >= 0
    assert right.max() <= width
    assert bottom.max() <= height
    assert (right - left).min() >= 1
    assert (bottom - top).min() >= 1


@pytest.mark.parametrize("min_crop", [0.08, 0.35])
def test_areas_and_aspect_ratios_span_their_ranges(min_crop: float) -> None:
    left, top, right, bottom = _boxes(500, 375, min_crop).T
    area, aspect = (right - left) * (bottom - top) / (500 * 375), (right - left) / (bottom - top)
    assert min_crop * 0.98 < area.min() < min_crop + 0.02  # whole pixels move the limits a little
    assert 0.95 < area.max() <= 1
    assert RATIO[0] * 0.98 < aspect.min() < RATIO[0] * 1.02
    assert RATIO[1] * 0.98 < aspect.max() < RATIO[1] * 1.02


@pytest.mark.parametrize(("width", "height", "min_crop"), [(500, 375, 0.08), (240, 480, 0.35), (12, 9, 0.2)])
def test_the_distribution_is_torchvisions(width: int, height: int, min_crop: float) -> None:
    ours, theirs = _boxes(width, height, min_crop), _torchvisions_boxes(width, height, min_crop)
    bound = largest_distance(DRAWS, DRAWS)
    figures = {
        "area": lambda left, top, right, bottom: (right - left) * (bottom - top),
        "log aspect": lambda left, top, right, bottom: np.log((right - left) / (bottom - top)),
        "left": lambda left, top, right, bottom: left,
        "bottom": lambda left, top, right, bottom: bottom,
        "diagonal": lambda left, top, right, bottom: (left + right) / width + (top + bottom) / height,
        "room used": lambda left, top, right, bottom: (left + 0.5) / (width - (right - left) + 1),
    }
    for name, figure in figures.items():
        assert distance(figure(*ours.T), figure(*theirs.T)) < bound, name


@pytest.mark.parametrize(("width", "height"), [(1000, 100), (100, 1000), (301, 100)])
def test_crop_that_does_not_fit_is_centered_as_in_torchvision(width: int, height: int) -> None:
    ours, theirs = _boxes(width, height, 0.9, 50), _torchvisions_boxes(width, height, 0.9, 50)
    assert len(np.unique(theirs, axis=0)) == 1  # nothing of this area and aspect fits
    assert np.abs(ours - theirs[0]).max() <= 1  # theirs is rounded to whole pixels
    left, top, right, bottom = ours[0]
    assert left + right == pytest.approx(width)
    assert top + bottom == pytest.approx(height)


SHAPES = [(1, 5, 7), (3, 6, 9), (3, 8, 8)]


@dataclass(frozen=True)
class Constant(Draws):
    """Draws that are all `value`, so that a test knows the angle and the scale."""

    value: float = 0.0

    def uniform(self, purpose: str) -> npt.NDArray[np.float64]:
        return np.full(len(self.samples), self.value)


def _noise(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def _draws(count: int, epoch: int = 0) -> Draws:
    return Draws(seed=1, epoch=epoch, samples=np.arange(count, dtype=np.int64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding", ["zero", "reflect"])
@pytest.mark.parametrize(("shift", "flip"), [(0, False), (0, True), (2, False), (2, True)])
def test_gather_pads_then_crops_and_flips_with_equal_chances(
    shape: tuple[int, int, int], padding: Any, shift: int, flip: bool
) -> None:
    images = _noise(1500, *shape)
    mode = "constant" if padding == "zero" else "reflect"
    padded = F.pad(images.float(), (shift,) * 4, mode=mode).to(torch.uint8)
    height, width = shape[1:]
    crops = [
        padded[:, :, top : top + height, left : left + width]
        for top, left in product(range(2 * shift + 1), range(2 * shift + 1))
    ]
    possible = crops + [torch.flip(crop, (3,)) for crop in crops] if flip else crops
    picked = transforms.gather(images, _draws(1500), AugmentConfig(shift=shift, shift_padding=padding, flip=flip))
    matches = torch.stack([(picked == crop).flatten(1).all(1) for crop in possible])
    assert picked.dtype == torch.uint8
    assert matches.sum(0).tolist() == [1] * 1500  # each result is one of the possible ones
    expected = 1500 / len(possible)
    chi_square = ((matches.sum(1) - expected) ** 2 / expected).sum().item()
    degrees = len(possible) - 1
    assert chi_square <= degrees + 4 * (2 * degrees) ** 0.5


def test_gather_picks_the_samples_in_the_order_asked_for() -> None:
    images = _noise(9, 3, 4, 4)
    samples = np.array([8, 0, 0, 3])
    assert torch.equal(transforms.gather(images, Draws(0, 0, samples), AugmentConfig()), images[[8, 0, 0, 3]])


@pytest.mark.parametrize("shape", [(1, 9, 31), (3, 16, 12), (3, 8, 8)])
def test_warp_by_nothing_is_the_identity(shape: tuple[int, int, int]) -> None:
    images = _noise(4, *shape).double()
    assert torch.allclose(transforms.warp(images, _draws(4), AugmentConfig()), images, atol=1e-9, rtol=0)


@pytest.mark.parametrize("shape", [(1, 9, 31), (3, 16, 12)])
@pytest.mark.parametrize(("value", "sign"), [(0.0, -1), (1.0, 1)])
def test_warp_matches_torchvisions_affine_on_non_square_images(
    shape: tuple[int, int, int], value: float, sign: int
) -> None:
    images = _noise(2, *shape).double()
    draws = Constant(0, 0, np.arange(2), value)
    turned = transforms.warp(images, draws, AugmentConfig(rotate=35.0, zoom=0.25))
    slanted = transforms.warp(images, draws, AugmentConfig(shear=20.0))
    # Which way a positive angle goes is up to the draw.
    mode = InterpolationMode.BILINEAR
    assert torch.allclose(turned, affine(images, -35.0 * sign, [0, 0], 1 + 0.25 * sign, [0.0], mode), atol=1e-2, rtol=0)
    assert torch.allclose(slanted, affine(images, 0.0, [0, 0], 1.0, [20.0 * sign, 0.0], mode), atol=1e-2, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(41, 31), (24, 60)])
def test_warp_turns_slants_and_scales_about_the_center(height: int, width: int) -> None:
    """On images that hold each pixel's own place, the warped pixels tell where they come from."""
    y, x = np.mgrid[0:height, 0:width] - np.array([(height - 1) / 2, (width - 1) / 2])[:, None, None]
    places = torch.from_numpy(np.stack([x, y]))[None] + 1000
    warped = transforms.warp(
        places, Constant(0, 0, np.arange(1), 1.0), AugmentConfig(rotate=30.0, zoom=0.25, shear=15.0)
    )
    near = np.hypot(x, y) < min(height, width) / 4  # far from the zeros outside
    sources = (warped[0].numpy() - 1000)[:, near]
    matrix = sources @ np.linalg.pinv(np.stack([x, y])[:, near])
    assert np.allclose(matrix @ np.stack([x, y])[:, near], sources, atol=1e-9)  # nothing is moved
    turn, rest = np.linalg.qr(matrix)
    assert np.allclose(np.abs(turn), [[3**0.5 / 2, 0.5], [0.5, 3**0.5 / 2]])
    assert np.allclose(np.abs(rest), np.array([[1, np.tan(np.radians(15))], [0, 1]]) / 1.25)


@pytest.mark.parametrize("config", [AugmentConfig(rotate=20.0), AugmentConfig(zoom=0.3), AugmentConfig(shear=9.0)])
def test_warp_treats_each_image_in_its_own_way(config: AugmentConfig) -> None:
    images = _noise(1, 1, 9, 9).double().expand(50, 1, 9, 9)
    assert len(torch.unique(transforms.warp(images, _draws(50), config), dim=0)) == 50
    assert transforms.warps(config)
    assert not transforms.warps(AugmentConfig(shift=2, flip=True, cutout=2))


@pytest.mark.parametrize(("side", "height", "width"), [(3, 8, 8), (4, 8, 11), (5, 7, 12), (9, 6, 6)])
def test_cutout_blanks_a_square_clipped_at_the_edges(side: int, height: int, width: int) -> None:
    images = torch.rand(3000, 2, height, width, generator=torch.Generator().manual_seed(0)) + 1
    before = images.clone()
    result = transforms.cutout_(images, _draws(3000), side)
    assert result.data_ptr() == images.data_ptr()
    blank = images == 0
    assert torch.equal(images, before * ~blank)
    assert torch.equal(blank[:, 0], blank[:, 1])
    rows, columns = blank[:, 0].any(2), blank[:, 0].any(1)
    assert torch.equal(blank[:, 0], rows[:, :, None] & columns[:, None, :])
    for lines, length in ((rows, height), (columns, width)):
        spans = {tuple(line.nonzero().flatten().tolist()) for line in lines}
        assert all(span == tuple(range(span[0], span[-1] + 1)) for span in spans)
        inner = {span for span in spans if span[0] > 0 and span[-1] < length - 1}
        assert {len(span) for span in inner} <= {side}
        assert all(min(side // 2, length) <= len(span) <= side for span in spans)
        if side < length:
            assert len(spans) == length
            assert inner
    if side < min(height, width):
        assert len(blank[:, 0].unique(dim=0)) == height * width  # a square for every centre


def test_alternate_flips_decide_once_then_alternate_each_epoch() -> None:
    images, config = _noise(1000, 1, 4, 5), AugmentConfig(flip=True, flip_alternate=True)
    flipped = []
    for epoch in range(4):
        gathered = transforms.gather(images, _draws(1000, epoch), config)
        as_it_was = (gathered == images).flatten(1).all(1)
        assert torch.equal(gathered[~as_it_was], images[~as_it_was].flip(3))
        flipped.append(~as_it_was)
    assert flipped[0].float().mean() == pytest.approx(0.5, abs=0.05)
    assert torch.equal(flipped[0], ~flipped[1])
    assert torch.equal(flipped[0], flipped[2])
    assert torch.equal(flipped[1], flipped[3])
    drawn = transforms.gather(images, _draws(1000), AugmentConfig(flip=True))
    assert torch.equal(drawn, transforms.gather(images, _draws(1000), config))


def _images(count: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


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
        for name in ("row", "column", *(f"{kind} {k}" for kind in ("area", "ratio") for k in range(ATTEMPTS)))
    }
    for sample in range(100):
        shapes = iter([uniforms[f"{kind} {k}"][sample] for k in range(ATTEMPTS) for kind in ("area", "ratio")])
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
