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
from torch.optim import optimizer

TYPES = (torch.float32, torch.float64)  # of lower precisions, the kernel rounds other intermediate results


class HostSGD(optim.SGD):
    """torch's SGD, with a faster step. Hooks, closures, sparse gradients and rare settings are left to torch's step."""

    @staticmethod
    def supports(parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether the kernel computes what torch's own step does, up to the last bit."""
        return all(each.is_cpu and each.dtype in TYPES and _fills_its_memory(each) for each in parameters)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step, as torch's SGD does."""
        if closure is not None or self._has_hooks():
            return _usual_step(self, closure)
        groups = [(group, [each for each in group["params"] if each.grad is not None]) for group in self.param_groups]
        if not all(_is_usual(group, parameters) for group, parameters in groups):
            return _usual_step(self)
        with torch.no_grad():
            for group, parameters in groups:
                if parameters:
                    self._update(group, parameters)
        return None

    # torch's wrapper, which records the step for its profiler and calls the hooks, takes longer than the step itself.
    step.hooked = True  # type: ignore[attr-defined]

    def _has_hooks(self) -> bool:
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return bool(own or optimizer._global_optimizer_pre_hooks or optimizer._global_optimizer_post_hooks)

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        momentum = group["momentum"]
        torch._fused_sgd_(
            list[torch.Tensor](parameters),
            [_laid_out(parameter.grad, parameter) for parameter in parameters],  # type: ignore[arg-type]  # not None
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
        momentum = torch.zeros_like(parameter) if momentum is None else _laid_out(momentum, parameter)
        state["momentum_buffer"] = momentum
        return momentum


# Creating the first SGD puts the wrapper around its step.
_usual_step: Callable[..., Any] = (
    optim.SGD.step if hasattr(optim.SGD.step, "hooked") else optimizer.Optimizer.profile_hook_step(optim.SGD.step)
)


def _is_usual(group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> bool:
    rare = group["dampening"] or group["maximize"]
    return not rare and not any(parameter.grad.layout is not torch.strided for parameter in parameters)  # type: ignore[union-attr]


def _fills_its_memory(parameter: nn.Parameter) -> bool:
    return parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)


def _laid_out(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return the tensor in the layout of its parameter: the kernel reads both as flat memory."""
    strides = tensor.stride(), parameter.stride()
    if strides[0] == strides[1] or all(size == 1 or a == b for size, a, b in zip(tensor.shape, *strides, strict=True)):
        return tensor
    return torch.empty_like(parameter).copy_(tensor)
