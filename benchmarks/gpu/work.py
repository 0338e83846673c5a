"""How much a training step of a network has to compute and to move, per image."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

IMAGES = 2
BYTES = 2  # of a bf16 number


class Work(NamedTuple):
    """Operations, and bytes that kernels of one layer each move at the least; forward and backward, of one image."""

    operations: float
    bytes: float


def work_of(model: nn.Module, channels: int, side: int) -> Work:
    """Count on the CPU.

    Operations are those of convolutions and matrix products, forward and backward. Bytes: each layer reads its input
    and writes its output, and backward reads the gradient of its output and its input and writes the input's gradient,
    in bf16; weights and the optimizer's state, which a batch shares, are left out. What fuses layers moves less.
    """
    model = copy.deepcopy(model).cpu().float().train()
    moved = 0

    def count(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        nonlocal moved
        arrived = sum(each.numel() for each in inputs if isinstance(each, torch.Tensor))
        moved += BYTES * (3 * arrived + 2 * output.numel())

    hooks = [each.register_forward_hook(count) for each in model.modules() if not list(each.children())]
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.randn(IMAGES, channels, side, side)).float().sum().backward()
    for hook in hooks:
        hook.remove()
    return Work(counter.get_total_flops() / IMAGES, moved / IMAGES)
