"""The input of one training or evaluation step."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """Images, floating [N, C, H, W], and labels, int64 [N].

    `weights` [N] is None if every sample has weight 1. For mixed images, `labels` are the labels with the larger share,
    `shares` [N] are these shares (at least 1/2), and `others` [N] the labels of the rest. Both are None without mixing.
    """

    images: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor | None = None
    others: torch.Tensor | None = None
    shares: torch.Tensor | None = None
