"""Random changes to whole batches of small images, each drawn from (seed, epoch, sample)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lockstep.config import AugmentConfig
from lockstep.data.draws import Draws, Indices


def gather(images: torch.Tensor, draws: Draws, config: AugmentConfig) -> torch.Tensor:
    """Pick samples from a set, shifted and mirrored, in a single pass.

    Args:
        images: The whole set, uint8 [M, C, H, W].
        draws: The samples to pick, and their draws.

    Returns:
        uint8 [N, C, H, W], on the device of `images`.
    """
    samples = torch.from_numpy(draws.samples).to(images.device)
    if not (config.shift or config.flip):
        return images.index_select(0, samples)
    _, channels, height, width = images.shape
    rows, columns = np.arange(height)[None], np.arange(width)[None]
    if config.flip:
        columns = np.where(mirrored(draws, config)[:, None], columns[:, ::-1], columns)
    if config.shift:
        rows = rows + draws.integers("shift rows", -config.shift, config.shift)[:, None]
        columns = columns + draws.integers("shift columns", -config.shift, config.shift)[:, None]
    y, x = (
        torch.from_numpy(_reflect(part, length)).to(images.device)
        for part, length in ((rows, height), (columns, width))
    )
    channel = torch.arange(channels, device=images.device)
    picked = images[samples[:, None, None, None], channel[:, None, None], y[:, None, :, None], x[:, None, None, :]]
    if config.shift and config.shift_padding == "zero":
        inside = [
            torch.from_numpy((part >= 0) & (part < length)).to(images.device)
            for part, length in ((rows, height), (columns, width))
        ]
        picked *= (inside[0][:, :, None] & inside[1][:, None, :])[:, None]
    return picked


def mirrored(draws: Draws, config: AugmentConfig) -> npt.NDArray[np.bool_]:
    """Which samples to mirror, bool [N], with `--flip`.

    With `--flip-alternate` the first epoch decides at random and every further epoch shows the other side, so that any
    two epochs in a row show both (K. Jordan, arXiv 2404.00498).
    """
    if not config.flip_alternate:
        return draws.uniform("flip") < 0.5
    at_first = replace(draws, epoch=0).uniform("flip") < 0.5
    return np.asarray(at_first ^ (draws.epoch % 2 == 1))


def _reflect(positions: Indices, length: int) -> Indices:
    """Fold positions outside 0 .. length - 1 back in, as a mirror at the edge pixel's centre does."""
    last = max(1, length - 1)
    folded: Indices = last - np.abs(last - np.abs(positions) % (2 * last))
    return np.minimum(folded, length - 1)


def warps(config: AugmentConfig) -> bool:
    """Whether a configuration asks for anything that `warp` does."""
    return bool(config.rotate or config.zoom or config.shear)


def warp(images: torch.Tensor, draws: Draws, config: AugmentConfig) -> torch.Tensor:
    """Slant, rotate and scale about the centre, bilinearly, with zeros outside.

    Args:
        images: Floating [N, C, H, W]; the result is the same.
    """
    angle = np.radians(draws.between("rotate", -config.rotate, config.rotate))
    slant = np.tan(np.radians(draws.between("shear", -config.shear, config.shear)))
    scale = draws.between("zoom", 1 - config.zoom, 1 + config.zoom)
    cosine, sine, zero = np.cos(angle) / scale, np.sin(angle) / scale, np.zeros_like(angle)
    # From a place in the result to one in the image, in pixels; torch's places run from -1 to 1 along each side.
    aspect = images.shape[2] / images.shape[3]
    x = np.stack([cosine, (cosine * slant - sine) * aspect, zero], 1)
    y = np.stack([sine / aspect, sine * slant + cosine, zero], 1)
    matrix = torch.from_numpy(np.stack([x, y], 1)).to(images.device, images.dtype)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def cutout_(images: torch.Tensor, draws: Draws, side: int) -> torch.Tensor:
    """Blank a square of `side` pixels around a random centre, in place (T. DeVries, G. Taylor, arXiv 1708.04552).

    Args:
        images: Normalised, floating [N, C, H, W]: the blank is 0, the mean.
    """
    height, width = images.shape[2:]
    masks = []
    for purpose, length in (("cutout row", height), ("cutout column", width)):
        start = draws.integers(purpose, 0, length - 1)[:, None] - side // 2
        position = np.arange(length)[None]
        masks.append(torch.from_numpy((position >= start) & (position < start + side)).to(images.device))
    return images.masked_fill_((masks[0][:, :, None] & masks[1][:, None, :])[:, None], 0.0)
