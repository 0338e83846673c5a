"""The base of optimizers that scale each layer's step by the norm of its weights, and LARS.

LARS is momentum SGD with each layer's rate scaled by the ratio of weight norm to gradient norm.

Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", arXiv 1708.03888.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

Tensors = list[torch.Tensor]


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Return the result of the closure that computes the gradients of an optimizer's step, if there is one."""
    with torch.enable_grad():
        return closure() if closure is not None else None


class LayerwiseOptimizer(Optimizer):
    """Calls `step_group` of a subclass with the weights and gradients of each parameter group.

    As in torch's fused optimizers, a step has no effect if `found_inf`, a scalar on the device, is 1. The gradients are
    then overwritten.
    """

    found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. If there is a closure, call it first to compute the gradients, and return its result."""
        result = call_closure(closure)
        for group in self.param_groups:
            pairs = [(weight, weight.grad) for weight in group["params"] if weight.grad is not None]
            if pairs:
                weights, gradients = map(list, zip(*pairs, strict=True))
                if self.found_inf is not None:
                    for gradient in gradients:  # keeps the following values finite
                        gradient.masked_fill_(self.found_inf.bool(), 0.0)
                self.step_group(group, weights, gradients)
        return result

    def take_back(self) -> None:
        """Correct the host's step counts after `found_inf` skipped the last step."""

    def decay_(self, moments: Tensors, factor: float) -> None:
        """Multiply moments by a factor, unless the step is skipped."""
        found_inf = self.found_inf
        torch._foreach_mul_(moments, factor if found_inf is None else torch.where(found_inf.bool(), 1.0, factor))

    def taken(self, changes: Tensors) -> Tensors:
        """Return the changes, or zeros if the step is skipped."""
        return changes if self.found_inf is None else list(torch._foreach_mul(changes, 1 - self.found_inf))

    def step_group(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        """Change the weights of one group in place."""
        raise NotImplementedError


def lengths(tensors: Tensors) -> torch.Tensor:
    """Return the L2 norm of each tensor, [N]."""
    return torch.stack(torch._foreach_norm(tensors))


def scale_steps_(steps: Tensors, weights: Tensors, ratios: torch.Tensor, rate: float) -> None:
    """Multiply each weight's step by its ratio, from [N], and by the rate.

    A ratio counts as 1 for vectors (norms and biases), as in the published ImageNet recipes, and if it is 0 or not
    finite because a norm is 0.
    """
    factors = torch.where(ratios.isfinite() & (ratios > 0), ratios, 1.0) * rate
    for step, weight, factor in zip(steps, weights, factors.unbind(), strict=True):
        step.mul_(factor if weight.ndim > 1 else rate)


class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling.

    A weight w with gradient g and weight decay d moves by the momentum of rate * trust * (g + d w), where trust is
    `trust_coefficient` * |w| / (|g| + d |w|).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ):
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient},
        )

    def step_group(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        decay, rate, coefficient = group["weight_decay"], group["lr"], group["trust_coefficient"]
        of_weights = lengths(weights)
        trust = coefficient * of_weights / (lengths(gradients) + decay * of_weights)
        directions = list(torch._foreach_add(gradients, weights, alpha=decay))
        scale_steps_(directions, weights, trust, rate)
        for weight in weights:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        self.decay_(buffers, group["momentum"])
        torch._foreach_add_(buffers, self.taken(directions))
        torch._foreach_sub_(weights, self.taken(buffers))
