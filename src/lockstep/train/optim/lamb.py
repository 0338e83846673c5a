"""LAMB: Adam with each layer's step scaled by the norm of its weights.

Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962, algorithm 2
with the identity for phi.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lockstep.train.optim.lars import LayerwiseOptimizer, Tensors, lengths, scale_steps_


class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments.

    A weight w moves by rate * |w| / |u| * u, where u is Adam's step (with bias correction) plus weight decay times w.
    """

    _counted: Sequence[dict[str, Any]] = ()
    """States whose `step` was incremented in the last step."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step_group(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        states = [self._state_of(weight) for weight in weights]
        for state in states:
            state["step"] += 1
        self._counted = [*self._counted, *states] if self.found_inf is not None else []
        first_beta, second_beta = group["betas"]
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        if self.found_inf is None:
            torch._foreach_lerp_(means, gradients, 1 - first_beta)
        else:
            self.decay_(means, first_beta)
            torch._foreach_add_(means, gradients, alpha=1 - first_beta)
        self.decay_(squares, second_beta)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second_beta)
        steps = [float(state["step"]) for state in states]  # on the CPU, so this does not synchronize
        updates = list(torch._foreach_div(means, [1 - first_beta**step for step in steps]))
        denominators = torch._foreach_div(squares, [1 - second_beta**step for step in steps])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_div_(updates, denominators)
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        scale_steps_(updates, weights, lengths(weights) / lengths(updates), group["lr"])
        torch._foreach_sub_(weights, self.taken(updates))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._counted = []
        return super().step(closure)

    def take_back(self) -> None:
        for state in self._counted:
            state["step"] -= 1
        self._counted = []

    def _state_of(self, weight: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return state
