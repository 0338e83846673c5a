"""mixup and cutmix against a slow twin that treats one pair after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.config.schema import AugmentConfig
from lockstep.data.random_draws import Draws
from lockstep.data.sets import Batch
from lockstep.data.transforms import Mixing, draw_recipe, mixes, symmetric_beta

BOTH_KINDS = [AugmentConfig(mixup=0.4), AugmentConfig(cutmix=1.0), AugmentConfig(mixup=0.4, cutmix=1.0)]


def _draws(count: int) -> Draws:
    return Draws(5, 2, np.arange(count, dtype=np.int64))


def _batch(count: int, dtype: torch.dtype = torch.float64) -> Batch:
    images = torch.randn(count, 3, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Batch(images.to(dtype), torch.arange(count))


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 1.0, 3.0, 20.0])
def test_symmetric_beta_has_the_distribution_of_its_name(alpha: float) -> None:
    drawn = symmetric_beta(_draws(40_000), "x", alpha)
    assert ((drawn >= 0) & (drawn <= 1)).all()
    expected = np.random.default_rng(0).beta(alpha, alpha, 40_000)
    levels = np.linspace(0.02, 0.98, 25)
    found = np.searchsorted(np.sort(drawn), np.quantile(expected, levels)) / len(drawn)
    inside = np.quantile(expected, levels)
    certain = (inside > 1e-9) & (inside < 1 - 1e-9)  # beyond, small parameters crowd at the ends
    assert np.abs(found - levels)[certain].max() < 0.012  # Kolmogorov-Smirnov's bound for two such samples: 0.0115
    assert drawn.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


@pytest.mark.parametrize("config", BOTH_KINDS)
@pytest.mark.parametrize("count", [2, 9, 40])
def test_it_is_what_a_slow_twin_does_pair_by_pair(config: AugmentConfig, count: int) -> None:
    before, samples = _batch(count), np.arange(100, 100 + count, dtype=np.int64)
    mixed = Mixing(config, seed=5)(_batch(count), samples, epoch=2)
    for first in range(0, count - 1, 2):
        recipe = draw_recipe(Draws(5, 2, samples[first : first + 1]), config, 8, 12)
        for here, there in ((first, first + 1), (first + 1, first)):
            kept, foreign = 0.0, 0
            for y in range(8):
                for x in range(12):
                    inside = bool(recipe.rows[0, y] and recipe.columns[0, x])
                    own = 0.0 if inside else float(recipe.own[0])
                    foreign += inside
                    kept += own / 96
                    expected = own * before.images[here, :, y, x] + (1 - own) * before.images[there, :, y, x]
                    assert torch.allclose(mixed.images[here, :, y, x], expected, atol=1e-12)
            share = {int(mixed.labels[here]): float(mixed.shares[here])}
            share[int(mixed.others[here])] = 1 - float(mixed.shares[here])
            assert share == pytest.approx({here: kept, there: 1 - kept})
            assert mixed.shares[here] >= 0.5
            if foreign:
                assert share[there] == pytest.approx(foreign / 96, abs=1e-15)  # the box's area, to the pixel
    if count % 2:
        assert torch.equal(mixed.images[-1], before.images[-1])
        assert (int(mixed.labels[-1]), float(mixed.shares[-1])) == (count - 1, 1.0)


def test_with_both_flags_half_of_the_pairs_get_a_box() -> None:
    recipe = draw_recipe(_draws(4000), AugmentConfig(mixup=1.0, cutmix=1.0), 32, 32)
    blended = recipe.own < 1
    boxed = (recipe.rows.any(1)) & (recipe.columns.any(1))
    assert not (blended & boxed).any()
    assert blended.mean() == pytest.approx(0.5, abs=0.03)


def test_boxes_lie_everywhere_and_are_clipped_at_the_edges() -> None:
    recipe = draw_recipe(_draws(4000), AugmentConfig(cutmix=1.0), 8, 12)
    for lines in (recipe.rows, recipe.columns):
        assert (np.abs(np.diff(lines.astype(int), prepend=0, append=0, axis=1)).sum(1) <= 2).all()  # one span each
        assert lines.any(0).all()
    assert 0 < recipe.shares().min() < 0.2
    assert recipe.shares().max() == 1.0


@pytest.mark.parametrize("config", BOTH_KINDS)
def test_an_image_that_could_not_be_decoded_is_mixed_with_none(config: AugmentConfig) -> None:
    before, weights = _batch(6), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    mixed = Mixing(config, 5)(_batch(6)._replace(weights=weights), np.arange(6), 0)
    for alone in (0, 1, 4, 5):
        assert torch.equal(mixed.images[alone], before.images[alone])
        assert (int(mixed.labels[alone]), float(mixed.shares[alone])) == (alone, 1.0)
    assert not torch.equal(mixed.images[2:4], before.images[2:4])


def test_single_sample_or_disabled_mixing_changes_nothing() -> None:
    alone = _batch(1)
    assert Mixing(AugmentConfig(mixup=0.2))(alone, np.arange(1), 0) is alone
    several = _batch(4)
    assert not mixes(AugmentConfig())
    assert Mixing(AugmentConfig())(several, np.arange(4), 0) is several


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_order_in_memory_and_dtype_stay(dtype: torch.dtype) -> None:
    batch = _batch(5, dtype)._replace(images=_batch(5, dtype).images.to(memory_format=torch.channels_last))
    mixed = Mixing(AugmentConfig(cutmix=1.0))(batch, np.arange(5), 0)
    assert mixed.images.dtype == dtype
    assert mixed.images.is_contiguous(memory_format=torch.channels_last)
    assert mixed.shares.dtype == torch.float32
