"""Geometric augmentation of batches of small images, seeded by (seed, epoch, sample)."""

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
    """Select samples from a data set, randomly shifted and flipped.

    Args:
        images: The whole data set, uint8 [M, C, H, W].
        draws: The samples to select, and their draws.

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
    """Shear, rotate and scale about the center, with bilinear sampling and zero padding.

    Args:
        images: Floating [N, C, H, W].

    Returns:
        A tensor of the same shape and dtype.
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

    Args:
        images: Normalized, floating [N, C, H, W]; blank pixels are 0, the mean.
    """
    height, width = images.shape[2:]
    masks = []
    for purpose, length in (("cutout row", height), ("cutout column", width)):
        start = draws.integers(purpose, 0, length - 1)[:, None] - side // 2
        position = np.arange(length)[None]
        masks.append(send((position >= start) & (position < start + side), images.device))
    return images.masked_fill_((masks[0][:, :, None] & masks[1][:, None, :])[:, None], 0.0)
