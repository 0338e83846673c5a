"""LARS: momentum SGD with each layer's rate scaled by the ratio of weight norm to gradient norm.

Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", arXiv 1708.03888.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lockstep.train.optim.layerwise import LayerwiseOptimizer, Tensors, lengths, scale_steps_


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
