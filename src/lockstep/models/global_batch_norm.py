"""Batch normalization with the statistics of the global batch.

The workers' means and variances are combined by the formula of T. Chan et al., "Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances", 1979, which is accurate even if the mean is large. The gradient is that of
S. Ioffe and C. Szegedy, "Batch Normalization", arXiv 1502.03167, section 3, with sums over all workers.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

Tensor = torch.Tensor


class Peers(Protocol):
    """The collectives that a batch norm needs."""

    def gather(self, row: Tensor) -> Tensor:
        """Gather [F] of each worker into [workers, F]."""

    def sum(self, row: Tensor) -> Tensor:
        """Sum [F] over the workers."""


class GlobalBatchNorm(_BatchNorm):
    """Like torch.nn.BatchNorm1d, 2d and 3d, with statistics of the global batch.

    Takes [batch, features, ...] on any device, with any number of samples on each worker. In evaluation mode, it is
    ordinary batch normalization.
    """

    peers: Peers | None = None
    """None for a single worker."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.peers is None:
            return super().forward(input)
        self._check_input_dim(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        mean, variance = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        output: Tensor = _GlobalBatchNorm.apply(
            input, self.weight, self.bias, mean, variance, self.eps, factor, self.peers
        )
        return output


def _shaped(feature: Tensor, like: Tensor) -> Tensor:
    """Reshape [features] to [1, features, 1, ...], to broadcast with `like`."""
    return feature.view(1, -1, *[1] * (like.dim() - 2))


class _GlobalBatchNorm(torch.autograd.Function):
    """Normalizes with the statistics of the global batch, and updates the running statistics in place."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_variance: Tensor | None,
        eps: float,
        momentum: float,
        peers: Peers,
    ) -> Tensor:
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dimensions = [0, *range(2, input.dim())]
        features = input.shape[1]
        count = input.numel() // max(1, features)
        local_mean = values.mean(dimensions) if count else values.new_zeros(features)
        deviations = (values - _shaped(local_mean, values)).square().sum(dimensions)
        row = torch.cat([local_mean, deviations, local_mean.new_full((1,), count)])
        means, squares, counts = peers.gather(row).split([features, features, 1], 1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        square = squares.sum(0) + ((means - mean).square() * counts).sum(0)
        variance = square / total
        if running_mean is not None and running_variance is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = square / (total - 1).clamp(min=1)
            running_variance.lerp_(unbiased.to(running_variance.dtype), momentum)
        inverse = (variance + eps).rsqrt()
        normalized = (values - _shaped(mean, values)) * _shaped(inverse, values)
        ctx.peers = peers
        ctx.save_for_backward(normalized, weight, inverse, total)
        output = normalized if weight is None else normalized * _shaped(weight, values)
        return (output if bias is None else output + _shaped(bias, values)).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        normalized, weight, inverse, total = ctx.saved_tensors
        gradient = gradients[0].to(normalized.dtype)
        dimensions = [0, *range(2, gradient.dim())]
        bias_gradient = gradient.sum(dimensions)
        weight_gradient = (gradient * normalized).sum(dimensions)
        sums = ctx.peers.sum(torch.cat([bias_gradient, weight_gradient]))
        mean_gradient, mean_product = (sums / total).chunk(2)
        scale = inverse if weight is None else inverse * weight
        input_gradient = _shaped(scale, gradient) * (
            gradient - _shaped(mean_gradient, gradient) - normalized * _shaped(mean_product, gradient)
        )
        needs = ctx.needs_input_grad
        return (
            input_gradient.to(gradients[0].dtype),
            weight_gradient.to(weight.dtype) if needs[1] else None,
            bias_gradient if needs[2] else None,
            *[None] * 5,
        )
