"""What a step of training or evaluation gets."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """Images, floating [N, C, H, W], and labels, int64 [N]; `weights` [N] is None where every sample counts once.

    Of mixed images, `labels` are those with the larger share, at least 1/2 each, which `shares` [N] holds; `others` [N]
    are the labels of the rest. Both are None where images are not mixed.
    """

    images: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor | None = None
    others: torch.Tensor | None = None
    shares: torch.Tensor | None = None
