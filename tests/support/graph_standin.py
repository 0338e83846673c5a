"""A stand-in for `torch.cuda.make_graphed_callables`, where there is no GPU that has graphs.

It has what is a trap for its callers: passes before the capture, which change buffers and draw random numbers, and one
memory for the inputs, the outputs and the gradients of all steps. Instead of a recording, it runs the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

calls: list[int] = []  # the number of replays of each graph


def make_graphed_callables(
    function: Callable[..., Any], samples: tuple[Any, ...], num_warmup_iters: int = 3, allow_unused_input: bool = False
) -> Callable[..., Any]:
    trained = [each for each in samples if each.requires_grad]

    def run() -> tuple[Any, Any]:
        with torch.enable_grad():
            output = function(*samples)
        return output, lambda gradient: torch.autograd.grad(output, trained, gradient, allow_unused=allow_unused_input)

    for _ in range(num_warmup_iters + 1):
        output, gradients = run()
        gradients_of_all = gradients(torch.empty_like(output))
    memory = torch.empty_like(output.detach())
    gradient_memory = [None if each is None else torch.empty_like(each) for each in gradients_of_all]
    number = len(calls)
    calls.append(0)

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            calls[number] += 1
            for sample, given in zip(samples, inputs, strict=True):
                if sample is not given and sample.data_ptr() != given.data_ptr():
                    sample.copy_(given)
            output, ctx.gradients = run()
            memory.copy_(output.detach())
            return memory.detach()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
            for target, each in zip(gradient_memory, ctx.gradients(gradient), strict=True):
                if target is not None:
                    target.copy_(each)
            found = iter(gradient_memory)
            aliases = [next(found) if each.requires_grad else None for each in samples]
            return tuple(None if each is None else each.detach() for each in aliases)

    return Graphed.apply  # type: ignore[no-any-return]
