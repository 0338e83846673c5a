"""Random changes to whole batches of small images, each drawn from (seed, epoch, sample)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lockstep.config.schema import AugmentConfig
from lockstep.data.augment.random_draws import Draws
from lockstep.data.pipeline.sending import send


def gather(images: torch.Tensor, draws: Draws, config: AugmentConfig) -> torch.Tensor:
    """Pick samples from a set, shifted and mirrored.

    Args:
        images: The whole set, uint8 [M, C, H, W].
        draws: The samples to pick, and their draws.

    Returns:
        uint8 [N, C, H, W], on the device of `images`.
    """
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
    # A row of an image is a run of bytes in its frame. Picking whole runs is several times faster than picking pixels.
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
    """Images [N, C, H, W] with `margin` more pixels on each side: zeros, or reflected at the edge pixel's centre."""
    if padding == "zero" or not margin:
        return F.pad(images, (margin,) * 4)
    for dim in (3, 2):
        length = images.shape[dim]
        before = images.narrow(dim, 1, margin).flip(dim)
        after = images.narrow(dim, length - 1 - margin, margin).flip(dim)
        images = torch.cat([before, images, after], dim)
    return images


def mirrored(draws: Draws, config: AugmentConfig) -> npt.NDArray[np.bool_]:
    """Which samples to mirror, bool [N], with `--flip`.

    With `--flip-alternate` the first epoch decides at random and every further epoch shows the other side, so that any
    two epochs in a row show both (K. Jordan, arXiv 2404.00498).
    """
    if not config.flip_alternate:
        return draws.uniform("flip") < 0.5
    at_first = replace(draws, epoch=0).uniform("flip") < 0.5
    return np.asarray(at_first ^ (draws.epoch % 2 == 1))


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
    matrix = send(np.stack([x, y], 1), images.device).to(images.dtype)
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
        masks.append(send((position >= start) & (position < start + side), images.device))
    return images.masked_fill_((masks[0][:, :, None] & masks[1][:, None, :])[:, None], 0.0)
