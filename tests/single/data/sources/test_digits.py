"""The digits that come with the package."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.data.sources import digits


def test_the_split_is_fixed() -> None:
    data = digits.load()
    assert data.train.images.shape == (1437, 1, 8, 8)
    assert data.val.images.shape == (360, 1, 8, 8)
    assert data.classes == tuple("0123456789")
    counts = torch.bincount(data.val.labels, minlength=10).tolist()
    assert counts == [35, 36, 35, 37, 37, 37, 37, 36, 33, 37]
    assert torch.bincount(data.train.labels, minlength=10).sum() == 1437


def test_the_pixels_use_the_whole_range_in_17_steps() -> None:
    data = digits.load()
    levels = torch.cat([data.train.images, data.val.images]).unique().tolist()
    assert data.train.images.dtype == torch.uint8
    assert levels == [round(255 * ink / 16) for ink in range(17)]


def test_stated_mean_and_deviation_match_the_training_images() -> None:
    data = digits.load()
    pixels = data.train.images.numpy().astype(np.float64) / 255
    assert data.input.mean == pytest.approx([pixels.mean()], abs=1e-3)
    assert data.input.std == pytest.approx([pixels.std()], abs=1e-3)


def test_the_labels_belong_to_the_images() -> None:
    """The nearest training image knows almost every test digit (96 % is what this method is known to reach)."""
    data = digits.load()
    train, val = (split.images.flatten(1).float() for split in (data.train, data.val))
    nearest = torch.cdist(val, train).argmin(1)
    assert (data.train.labels[nearest] == data.val.labels).double().mean() > 0.95
