"""Mixup and cutmix: mix pairs of training images, seeded by (seed, epoch, first sample of the pair).

Pairs are adjacent in a batch: samples 0 and 1, 2 and 3, and so on; an odd last sample is not mixed. `sharding.py` keeps
each pair on one worker, so the mixed images do not depend on the number of workers.
mixup: H. Zhang et al., arXiv 1710.09412. cutmix: S. Yun et al., arXiv 1905.04899.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lockstep.config.schema import AugmentConfig
from lockstep.data.augment.random_draws import Draws, Indices
from lockstep.data.sets import Batch
from lockstep.world.accelerator import send

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def mixes(config: AugmentConfig) -> bool:
    """Return whether a configuration has mixup or cutmix."""
    return bool(config.mixup or config.cutmix)


def symmetric_beta(draws: Draws, purpose: str, alpha: float) -> Floats:
    """Return draws from Beta(alpha, alpha), float64 [N], each from two uniform draws.

    R. W. Bailey's generator of Student's t with 2 alpha degrees of freedom (Mathematics of Computation 62, 1994),
    transformed to a beta as in L. Devroye (Winter Simulation Conference 1996).
    """
    cosine = np.cos(2 * np.pi * draws.uniform(f"{purpose} angle"))
    root = draws.uniform(f"{purpose} radius") ** (1 / alpha)
    far = (1 - root) * cosine**2
    return np.asarray(0.5 + 0.5 * np.sign(cosine) * np.sqrt(far / (root + far)))


@dataclass(frozen=True)
class Recipe:
    """How to mix the images of K pairs.

    Outside a box, the mixed image is a blend: the fraction `own` [K] of the image itself, the rest of the other image.
    Inside the box, it is the other image. The box is the intersection of `rows` [K, H] and `columns` [K, W]; it is
    empty for mixup.
    """

    own: Floats
    rows: Mask
    columns: Mask

    def shares(self) -> Floats:
        """Return the fraction of itself that each mixed image contains, averaged over its area, float64 [K]."""
        boxes = self.rows.sum(1) * self.columns.sum(1)
        return np.asarray(self.own * (1 - boxes / (self.rows.shape[1] * self.columns.shape[1])))


def draw_recipe(draws: Draws, config: AugmentConfig, height: int, width: int) -> Recipe:
    """Draw how to mix pairs whose first samples are those of `draws`. With mixup and cutmix, each pair draws one."""
    count = len(draws.samples)
    by_box = np.full(count, bool(config.cutmix))
    if config.cutmix and config.mixup:
        by_box = draws.uniform("mix by box") < 0.5
    own = np.ones(count)
    rows, columns = np.zeros((count, height), bool), np.zeros((count, width), bool)
    if config.mixup:
        own = np.where(by_box, 1.0, symmetric_beta(draws, "mixup", config.mixup))
    if config.cutmix:
        side = np.sqrt(1 - symmetric_beta(draws, "cutmix", config.cutmix))
        rows = _span(draws, "cutmix row", side, height) & by_box[:, None]
        columns = _span(draws, "cutmix column", side, width) & by_box[:, None]
    return Recipe(own, rows, columns)


def _span(draws: Draws, purpose: str, side: Floats, length: int) -> Mask:
    """Return a mask [K, length] of spans that cover the fraction `side` [K] of `length`, around random centers."""
    reach = np.floor(side * length).astype(np.int64)[:, None]
    start = draws.integers(purpose, 0, length - 1)[:, None] - reach // 2
    position = np.arange(length)[None]
    return np.asarray((position >= start) & (position < start + reach))


class Mixing:
    """Mixes the pairs of training batches; a no-op without mixup and cutmix."""

    def __init__(self, config: AugmentConfig, seed: int = 0):
        self._config, self._seed = config, seed

    def __call__(self, batch: Batch, samples: Indices, epoch: int) -> Batch:
        """Mix a batch of normalized images in place.

        `labels` of the result are the labels with the larger share of each image, `others` the other labels.
        """
        pairs = len(samples) // 2
        if not mixes(self._config) or not pairs:
            return batch
        images = batch.images[: 2 * pairs].unflatten(0, (pairs, 2))
        device, dtype = images.device, images.dtype
        recipe = draw_recipe(Draws(self._seed, epoch, samples[: 2 * pairs : 2]), self._config, *images.shape[3:])
        if batch.weights is not None:  # pairs with an undecodable image are not mixed
            recipe = _spare(recipe, (batch.weights[: 2 * pairs].view(pairs, 2) > 0).all(1).cpu().numpy())
        own, rows, columns = (send(part, device) for part in (recipe.own, recipe.rows, recipe.columns))
        box = rows[:, :, None] & columns[:, None, :]
        kept = own.to(dtype)[:, None, None].expand(box.shape).masked_fill(box, 0)[:, None, None]
        images.copy_(torch.lerp(images.flip(1), images, kept))

        shares = np.ones(len(samples))
        shares[: 2 * pairs] = recipe.shares().repeat(2)
        others = batch.labels.clone()
        others[: 2 * pairs] = batch.labels[: 2 * pairs].view(pairs, 2).flip(1).flatten()
        swapped = send(shares < 0.5, device)
        return batch._replace(
            labels=torch.where(swapped, others, batch.labels),
            others=torch.where(swapped, batch.labels, others),
            shares=send(np.maximum(shares, 1 - shares), device).to(torch.promote_types(dtype, torch.float32)),
        )


def _spare(recipe: Recipe, mixed: Mask) -> Recipe:
    """Return the recipe with mixing disabled for pairs where `mixed` [K] is False."""
    return Recipe(np.where(mixed, recipe.own, 1.0), recipe.rows & mixed[:, None], recipe.columns & mixed[:, None])
