"""Muon for matrices with AdamW for all other parameters, as one optimizer.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon, 2024.
The steps of matrices have the size of AdamW's, so that one rate and one weight decay fit both: J. Liu et al., "Muon is
Scalable for LLM Training", arXiv 2502.16982.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from lockstep.train.optim.lars import call_closure


class MuonAdamW(Optimizer):
    """Take the steps of torch.optim.Muon in parameter groups with `is_matrix`, and of torch.optim.AdamW in others.

    A weight of more than two dimensions, such as a convolution's, is a matrix with one row for each output channel.
    torch's optimizers are created for each step, around the state of this one, which is the only one to store.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ):
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "is_matrix": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. If there is a closure, call it first to compute the gradients, and return its result."""
        result = call_closure(closure)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                (self._step_matrices if group["is_matrix"] else self._step_others)(group, weights)
        return result

    def _step_others(self, group: dict[str, Any], weights: Sequence[nn.Parameter]) -> None:
        adamw = optim.AdamW(weights, group["lr"], group["betas"], weight_decay=group["weight_decay"])
        adamw.state = self.state
        adamw.step()

    def _step_matrices(self, group: dict[str, Any], weights: Sequence[nn.Parameter]) -> None:
        matrices = [nn.Parameter(_rows(weight.detach(), weight)) for weight in weights]
        settings = {name: group[name] for name in ("lr", "weight_decay", "momentum", "nesterov")}
        muon = optim.Muon(matrices, **settings, adjust_lr_fn="match_rms_adamw")
        for weight, matrix in zip(weights, matrices, strict=True):
            state, gradient = self.state[weight], torch.empty_like(weight)
            gradient.copy_(weight.grad)  # type: ignore[arg-type]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            matrix.grad = _rows(gradient, weight)
            muon.state[matrix]["momentum_buffer"] = _rows(state["momentum_buffer"], weight)
        muon.step()


def _rows(tensor: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """Return a tensor with the memory layout of `weight` as a matrix over the same memory, with a row for each output.

    In channels_last, channels are the last columns, which changes steps by rounding alone.
    """
    return (tensor if weight.is_contiguous() else tensor.movedim(1, -1)).view(len(weight), -1)
