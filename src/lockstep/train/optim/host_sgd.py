"""SGD on a CPU by torch's fused kernel, called directly.

The kernel passes over the weights once. The rest of torch's `step` takes three times as long as the kernel in a
network of 20,000 weights. At the end of a tensor, the elements that do not fill a vector of the processor may differ
from those of `torch.optim.SGD` in the last bit, since a compiler may join a multiplication with an addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import Optimizer

TYPES = (torch.float32, torch.float64)  # of lower precisions, the kernel rounds other intermediate results


class HostSGD(optim.SGD):
    """torch's SGD without dampening, with a faster step. Hooks, closures and unusual gradients are left to torch's."""

    @staticmethod
    def supports(parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether the kernel computes what torch's own step does, up to the last bit."""
        return all(parameter.is_cpu and parameter.dtype in TYPES for parameter in parameters)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step, as torch's SGD does."""
        if closure is not None or self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return _usual_step(self, closure)
        groups = [(group, [each for each in group["params"] if each.grad is not None]) for group in self.param_groups]
        if not all(_has_layout_of(parameter) for _, parameters in groups for parameter in parameters):
            return _usual_step(self)
        with torch.no_grad():
            for group, parameters in groups:
                if parameters:
                    self._update(group, parameters)
        return None

    # torch's wrapper, which records the step for its profiler and calls the hooks, takes longer than the step itself.
    step.hooked = True  # type: ignore[attr-defined]

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        momentum = group["momentum"]
        torch._fused_sgd_(
            list[torch.Tensor](parameters),
            [parameter.grad for parameter in parameters],  # type: ignore[misc]  # None was left out
            [self._momentum_of(parameter) for parameter in parameters] if momentum else [],
            lr=group["lr"],
            momentum=momentum,
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            dampening=0.0,
            maximize=False,
            is_first_step=False,
        )

    def _momentum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        state = self.state[parameter]
        momentum: torch.Tensor | None = state.get("momentum_buffer")
        if momentum is None:
            momentum = state["momentum_buffer"] = torch.zeros_like(parameter)
        return momentum


# Creating the first SGD puts the wrapper around its step.
_usual_step: Callable[..., Any] = (
    optim.SGD.step if hasattr(optim.SGD.step, "hooked") else Optimizer.profile_hook_step(optim.SGD.step)
)


def _has_layout_of(parameter: nn.Parameter) -> bool:
    """Return whether the gradient has the layout of its parameter: the kernel reads both as flat memory."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.layout is torch.strided and gradient.stride() == parameter.stride()
