"""Batch normalization with the statistics of the global batch, and the conversion of a model to it.

The workers' means and variances are combined by the formula of T. Chan et al., "Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances", 1979, which is accurate even if the mean is large. The gradient is that of
S. Ioffe and C. Szegedy, "Batch Normalization", arXiv 1502.03167, section 3, with sums over all workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from traceback import walk_stack
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lockstep.errors import ConfigError
from lockstep.models.trial_forward import user_frame

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


PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_batch_norm(model: nn.Module) -> None:
    """Check that all batch norms can be converted without losing functionality.

    Raises:
        ConfigError: A batch norm does more than torch's, such as timm's norms with an activation.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and type(module) not in (*PLAIN, nn.SyncBatchNorm, GlobalBatchNorm):
            raise ConfigError(
                f"--sync-bn cannot replace {type(module).__name__} (layer {name}), which does more than batch norm; "
                f"leave out --sync-bn, or choose a model with torch's BatchNorm"
            )


def has_other_buffers(model: nn.Module) -> bool:
    """Return whether a module other than batch norm has buffers, on which its forward pass may depend."""
    known = (*PLAIN, nn.SyncBatchNorm, GlobalBatchNorm)
    return any(
        type(module) not in known and any(True for _ in module.buffers(recurse=False)) for module in model.modules()
    )


def convert_batch_norm(model: nn.Module, kind: type[_BatchNorm], **attributes: Any) -> None:
    """Make each batch norm one of another class, such as nn.SyncBatchNorm, which computes over all workers.

    Each stays the same object, so that all references to it, its hooks and its attributes hold. The model's first
    forward pass in training refuses what was not converted, unless torch.compile runs it.
    """
    for module in model.modules():
        if type(module) in PLAIN:
            module.__class__ = kind
            vars(module).update(attributes)
    first = _FirstForward()
    model.register_forward_pre_hook(first.begin)
    model.register_forward_hook(first.end, always_call=True)


class _FirstForward:
    """Hooks that watch a model's first forward pass in training."""

    def __init__(self) -> None:
        self._watch: _BatchNormWatch | None = None
        self._is_done = False

    def begin(self, model: nn.Module, _: object) -> None:
        if not torch.compiler.is_compiling() and model.training and not self._is_done and self._watch is None:
            self._watch = _BatchNormWatch()
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self._watch is not None:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._watch, self._is_done = None, True


class _BatchNormWatch(TorchFunctionMode):
    """Refuses batch statistics of one worker, such as of a module in a plain list, which `modules` does not find."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.batch_norm and (kwargs or {}).get("training"):
            where = user_frame(reversed([*walk_stack(None)]))
            raise ConfigError(
                f"--sync-bn (sync_bn=True) has not replaced a batch norm of {args[0].shape[1]} features{where}, which "
                f"uses the statistics of one worker; register it as a submodule (nn.ModuleList instead of a list), or "
                f"leave out --sync-bn"
            )
        return function(*args, **(kwargs or {}))
