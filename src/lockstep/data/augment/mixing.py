"""Mixing pairs of training images: mixup and cutmix, each pair by draws of (seed, epoch, its first sample).

The pairs are neighbours in a batch: samples 0 and 1, 2 and 3, and so on; an odd last one stays as it is. `sharding.py`
keeps the pairs of a global batch on one worker, so any number of workers mixes the same pairs by the same shares.
mixup: H. Zhang et al., arXiv 1710.09412. cutmix: S. Yun et al., arXiv 1905.04899.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lockstep.config.schema import AugmentConfig
from lockstep.data.augment.random_draws import Draws, Indices
from lockstep.data.batch import Batch
from lockstep.data.pipeline.sending import send

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def mixes(config: AugmentConfig) -> bool:
    """Whether a configuration asks for mixup or cutmix."""
    return bool(config.mixup or config.cutmix)


def symmetric_beta(draws: Draws, purpose: str, alpha: float) -> Floats:
    """Draws from Beta(alpha, alpha), float64 [N], each from two uniform draws.

    R. W. Bailey's form of Student's t with 2 alpha degrees of freedom (Mathematics of Computation 62, 1994), turned
    into a beta as L. Devroye describes (Winter Simulation Conference 1996).
    """
    cosine = np.cos(2 * np.pi * draws.uniform(f"{purpose} angle"))
    root = draws.uniform(f"{purpose} radius") ** (1 / alpha)
    far = (1 - root) * cosine**2
    return np.asarray(0.5 + 0.5 * np.sign(cosine) * np.sqrt(far / (root + far)))


@dataclass(frozen=True)
class Recipe:
    """How the images of K pairs are made: `own` [K] of each image itself outside a box and none inside, the rest of
    the other one. The box is where `rows` [K, H] and `columns` [K, W] meet; mixup has none.
    """

    own: Floats
    rows: Mask
    columns: Mask

    def shares(self) -> Floats:
        """What each image keeps of itself, over its whole area, float64 [K]."""
        boxes = self.rows.sum(1) * self.columns.sum(1)
        return np.asarray(self.own * (1 - boxes / (self.rows.shape[1] * self.columns.shape[1])))


def draw_recipe(draws: Draws, config: AugmentConfig, height: int, width: int) -> Recipe:
    """How to mix pairs whose first samples are those of `draws`; with both flags, each pair draws one of the two."""
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
    """Which of `length` positions are in a span of the share `side` [K] around a random centre: [K, length]."""
    reach = np.floor(side * length).astype(np.int64)[:, None]
    start = draws.integers(purpose, 0, length - 1)[:, None] - reach // 2
    position = np.arange(length)[None]
    return np.asarray((position >= start) & (position < start + reach))


class Mixing:
    """Mixes the pairs of training batches as a configuration asks; without mixup and cutmix it changes nothing."""

    def __init__(self, config: AugmentConfig, seed: int = 0):
        self._config, self._seed = config, seed

    def __call__(self, batch: Batch, samples: Indices, epoch: int) -> Batch:
        """Mix a batch, normalised and on its device, in place.

        Its `labels` become those with the larger share of each image, `others` the other ones.
        """
        pairs = len(samples) // 2
        if not mixes(self._config) or not pairs:
            return batch
        images = batch.images[: 2 * pairs].unflatten(0, (pairs, 2))
        device, dtype = images.device, images.dtype
        recipe = draw_recipe(Draws(self._seed, epoch, samples[: 2 * pairs : 2]), self._config, *images.shape[3:])
        if batch.weights is not None:  # an image that could not be decoded stays alone
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
    """The same, but pairs that are not in `mixed` [K] stay as they are."""
    return Recipe(np.where(mixed, recipe.own, 1.0), recipe.rows & mixed[:, None], recipe.columns & mixed[:, None])
