"""Adasum: adds orthogonal gradients and averages parallel ones.

Algorithm: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924, sections 3 and 4.
Pairs of workers combine a and b to (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, then pairs of pairs, and so on.
"""

from __future__ import annotations

import torch

from lockstep.hvd.engine.transfers import Transfers


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the adaptive sum of two gradients of one shape, in their dtype; dot products are in float64."""
    one, other = a.to(torch.float64).reshape(-1), b.to(torch.float64).reshape(-1)
    product, one_square, other_square = one.dot(other), one.dot(one), other.dot(other)
    one_share = torch.where(one_square > 0, 1 - product / (2 * one_square), 1.0)
    other_share = torch.where(other_square > 0, 1 - product / (2 * other_square), 1.0)
    return (one_share * one + other_share * other).to(a.dtype).view_as(a)


def adasum_(tensor: torch.Tensor, transfers: Transfers) -> None:
    """Combine a tensor over all workers in place; all get the same bits. Their number must be a power of two."""
    distance = 1
    while distance < transfers.size:
        partner = transfers.rank ^ distance
        theirs = torch.empty_like(tensor)
        nothing = tensor.new_empty(0)
        outputs = [theirs if rank == partner else nothing for rank in range(transfers.size)]
        inputs = [tensor if rank == partner else nothing for rank in range(transfers.size)]
        transfers.all_to_all(outputs, inputs)
        lower_first = (tensor, theirs) if transfers.rank < partner else (theirs, tensor)
        tensor.copy_(combine(*lower_first))
        distance *= 2
