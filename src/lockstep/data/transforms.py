"""Random changes of images: crops, mirroring, warps, erasing, mixup and cutmix.

For mixup and cutmix, pairs are adjacent in a batch: samples 0 and 1, 2 and 3, and so on; an odd last sample is not
mixed. `sharding.py` keeps each pair on one worker, so the mixed images do not depend on the number of workers. The
draws are seeded by (seed, epoch, first sample of the pair).
mixup: H. Zhang et al., arXiv 1710.09412. cutmix: S. Yun et al., arXiv 1905.04899.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lockstep.config.schema import AugmentConfig
from lockstep.data.random_draws import Draws, Indices
from lockstep.data.sets import Batch
from lockstep.world.accelerator import send

if TYPE_CHECKING:
    from lockstep.data.decode import Box  # imports Pillow

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
ATTEMPTS = 10  # to draw a rectangle that fits
CROP_RATIO = (3 / 4, 4 / 3)


def _draw_rectangles(
    draws: Draws, name: str, areas: tuple[float, float], ratios: tuple[float, float]
) -> tuple[Floats, Floats]:
    """Return fractions of an image's area and, log-uniform, aspect ratios, each float64 [N, ATTEMPTS]."""
    low, high = map(math.log, ratios)
    area = [draws.between(f"{name} area {k}", *areas) for k in range(ATTEMPTS)]
    ratio = [draws.between(f"{name} ratio {k}", low, high) for k in range(ATTEMPTS)]
    return np.stack(area, 1), np.exp(np.stack(ratio, 1))


class RandomCrop:
    """Random crops of a batch of samples, drawn before the image sizes are known."""

    def __init__(self, draws: Draws, min_crop: float):
        self._areas, self._ratios = _draw_rectangles(draws, "crop", (min_crop, 1.0), CROP_RATIO)
        self._x = draws.uniform("crop x")
        self._y = draws.uniform("crop y")

    def box(self, position: int, width: int, height: int) -> Box:
        """Return (left, top, right, bottom) in pixels for the sample at `position` in the draws."""
        areas, ratios = self._areas[position] * width * height, self._ratios[position]
        widths, heights = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
        fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
        if fits.any():
            first = int(fits.argmax())
            crop_width, crop_height = float(widths[first]), float(heights[first])
            left = math.floor(self._x[position] * (width - crop_width + 1))
            top = math.floor(self._y[position] * (height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
        ratio = min(max(width / height, CROP_RATIO[0]), CROP_RATIO[1])
        crop_width, crop_height = min(width, height * ratio), min(height, width / ratio)
        left_edge, top_edge = (width - crop_width) / 2, (height - crop_height) / 2
        return left_edge, top_edge, left_edge + crop_width, top_edge + crop_height


def gather(images: torch.Tensor, draws: Draws, config: AugmentConfig) -> torch.Tensor:
    """Select the samples of `draws` from all images, uint8 [M, C, H, W], shifted and flipped at random."""
    picked = images.index_select(0, send(draws.samples, images.device))
    if not (config.shift or config.flip):
        return picked
    count, channels, height, width = picked.shape
    margin = config.shift
    frames = _frame(torch.cat([picked, picked.flip(3)]) if config.flip else picked, margin, config.shift_padding)
    top = margin + draws.integers("shift rows", -margin, margin)
    left = margin + draws.integers("shift columns", -margin, margin)
    number = np.arange(count)
    if config.flip:
        flipped = mirrored(draws, config)
        left = np.where(flipped, 2 * margin - left, left)
        number = number + count * flipped
    # Each row of an image is contiguous in its frame. Selecting rows is several times faster than selecting pixels.
    frame_height, frame_width = frames.shape[2:]
    corner = send((number * channels * frame_height + top) * frame_width + left, images.device)
    row = (
        torch.arange(height, device=images.device)
        + frame_height * torch.arange(channels, device=images.device)[:, None]
    )
    starts = corner[:, None] + frame_width * row.flatten()
    runs = frames.view(-1).as_strided((frames.numel() - width + 1, width), (1, 1))
    return runs.index_select(0, starts.flatten()).view(picked.shape)


def _frame(images: torch.Tensor, margin: int, padding: str) -> torch.Tensor:
    """Pad images [N, C, H, W] by `margin` pixels on each side: with zeros, or reflected at the edge pixel's center."""
    if padding == "zero" or not margin:
        return F.pad(images, (margin,) * 4)
    for dim in (3, 2):
        length = images.shape[dim]
        before = images.narrow(dim, 1, margin).flip(dim)
        after = images.narrow(dim, length - 1 - margin, margin).flip(dim)
        images = torch.cat([before, images, after], dim)
    return images


def mirrored(draws: Draws, config: AugmentConfig) -> npt.NDArray[np.bool_]:
    """Return which samples `--flip` mirrors, bool [N].

    With `--flip-alternate`, the first epoch is random and each later epoch flips the opposite samples, so that any two
    consecutive epochs show both sides (K. Jordan, arXiv 2404.00498).
    """
    if not config.flip_alternate:
        return draws.uniform("flip") < 0.5
    at_first = replace(draws, epoch=0).uniform("flip") < 0.5
    return np.asarray(at_first ^ (draws.epoch % 2 == 1))


def warps(config: AugmentConfig) -> bool:
    """Return whether a configuration needs `warp`."""
    return bool(config.rotate or config.zoom or config.shear)


def warp(images: torch.Tensor, draws: Draws, config: AugmentConfig) -> torch.Tensor:
    """Shear, rotate and scale images, floating [N, C, H, W], about the center.

    Sampling is bilinear, with zero padding.
    """
    angle = np.radians(draws.between("rotate", -config.rotate, config.rotate))
    slant = np.tan(np.radians(draws.between("shear", -config.shear, config.shear)))
    scale = draws.between("zoom", 1 - config.zoom, 1 + config.zoom)
    cosine, sine, zero = np.cos(angle) / scale, np.sin(angle) / scale, np.zeros_like(angle)
    # Maps output to input coordinates, in pixels; affine_grid uses -1 to 1 along each side, hence `aspect`.
    aspect = images.shape[2] / images.shape[3]
    x = np.stack([cosine, (cosine * slant - sine) * aspect, zero], 1)
    y = np.stack([sine / aspect, sine * slant + cosine, zero], 1)
    matrix = send(np.stack([x, y], 1), images.device).to(images.dtype)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def cutout_(images: torch.Tensor, draws: Draws, side: int) -> torch.Tensor:
    """Blank a square of `side` pixels around a random center, in place (T. DeVries, G. Taylor, arXiv 1708.04552).

    Images are normalized, floating [N, C, H, W]: blank pixels are 0, the mean.
    """
    rows, columns = (
        _span(draws.integers(f"cutout {name}", 0, length - 1) - side // 2, side, length)
        for name, length in zip(("row", "column"), images.shape[2:], strict=True)
    )
    return _blank_(images, rows, columns)


def _span(start: npt.NDArray[Any], side: npt.NDArray[Any] | int, length: int) -> Mask:
    """Return a mask [N, length] of `side` positions from `start` [N] on."""
    position = np.arange(length)[None]
    return np.asarray((position >= start[:, None]) & (position < (start + side)[:, None]))


def _blank_(images: torch.Tensor, rows: Mask, columns: Mask) -> torch.Tensor:
    """Set the pixels in both `rows` [N, H] and `columns` [N, W] to 0, in place."""
    box = send(rows, images.device)[:, :, None] & send(columns, images.device)[:, None, :]
    return images.masked_fill_(box[:, None], 0.0)


ERASING_AREA = (0.02, 0.33)
ERASING_RATIO = (0.3, 3.3)


def erase_(images: torch.Tensor, draws: Draws, share: float) -> torch.Tensor:
    """Blank a rectangle with probability `share` in each image, normalized [N, C, H, W], as `cutout_` does."""
    height, width = images.shape[2:]
    fractions, ratios = _draw_rectangles(draws, "erasing", ERASING_AREA, ERASING_RATIO)
    areas = height * width * fractions
    heights, widths = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (heights < height) & (widths < width)
    first = np.arange(len(fits)), fits.argmax(1)
    erased = (draws.uniform("erasing") < share) & fits.any(1)
    masks = []
    for name, length, sides in (("row", height, heights), ("column", width, widths)):
        side = np.where(erased, sides[first], 0)
        start = np.floor(draws.uniform(f"erasing {name}") * (length - side + 1))
        masks.append(_span(start, side, length))
    return _blank_(images, *masks)


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
    """The mixing of the images of K pairs.

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
    """Draw how to mix pairs whose first samples are in `draws`. With mixup and cutmix, each pair draws one."""
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
        rows = _around(draws, "cutmix row", side, height) & by_box[:, None]
        columns = _around(draws, "cutmix column", side, width) & by_box[:, None]
    return Recipe(own, rows, columns)


def _around(draws: Draws, purpose: str, side: Floats, length: int) -> Mask:
    """Return a mask [K, length] of spans that cover the fraction `side` [K] of `length`, around random centers."""
    reach = np.floor(side * length).astype(np.int64)
    return _span(draws.integers(purpose, 0, length - 1) - reach // 2, reach, length)


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
