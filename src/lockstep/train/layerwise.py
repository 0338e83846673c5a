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


def adapted(weight: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """The ratio by which a weight's step is scaled, a scalar on its device.

    It is 1 for vectors (norms and biases), as in the published ImageNet recipes, and where a length is 0.
    """
    if weight.ndim < 2:
        return torch.ones_like(ratio)
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
