"""The random crop of photographs, against torchvision's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from distributions import distance, largest_distance
from torchvision.transforms import RandomResizedCrop

from lockstep.data.random_draws import Draws
from lockstep.data.transforms import RandomCrop

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


def test_a_sample_has_the_same_crop_in_any_batch() -> None:
    whole = RandomCrop(Draws(4, 2, np.arange(100)), 0.08)
    some = RandomCrop(Draws(4, 2, np.array([70, 3])), 0.08)
    assert some.box(0, 500, 375) == whole.box(70, 500, 375)
    assert some.box(1, 64, 48) == whole.box(3, 64, 48)
    assert RandomCrop(Draws(4, 3, np.array([70])), 0.08).box(0, 500, 375) != whole.box(70, 500, 375)
