"""What LARS and LAMB share: optimizers that scale each layer's step by the length of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

Tensors = list[torch.Tensor]


class LayerwiseOptimizer(Optimizer):
    """Hands a variant each parameter group's weights and gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the closure, if there is one, computes the gradients first, and its result is returned."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            pairs = [(weight, weight.grad) for weight in group["params"] if weight.grad is not None]
            if pairs:
                weights, gradients = map(list, zip(*pairs, strict=True))
                self.step_group(group, weights, gradients)
        return result

    def step_group(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        """Change the weights of one group in place."""
        raise NotImplementedError


def lengths(tensors: Tensors) -> torch.Tensor:
    """The Euclidean length of each tensor, [N]."""
    return torch.stack(torch._foreach_norm(tensors))


def scale_steps_(steps: Tensors, weights: Tensors, ratios: torch.Tensor, rate: float) -> None:
    """Multiply each weight's step by its ratio, of [N], and by the rate.

    The ratio of vectors (norms and biases) counts as 1, as in the published ImageNet recipes, and so does one that is 0
    or not finite, because a length is 0.
    """
    factors = torch.where(ratios.isfinite() & (ratios > 0), ratios, 1.0) * rate
    for step, weight, factor in zip(steps, weights, factors.unbind(), strict=True):
        step.mul_(factor if weight.ndim > 1 else rate)
