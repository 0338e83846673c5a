"""Count the operations and bytes per image of a network's training step."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

IMAGES = 2
BYTES = 2  # per bf16 number


class Work(NamedTuple):
    """Operations, and the fewest bytes that unfused layers move, for one image, forward and backward."""

    operations: float
    bytes: float


def work_of(model: nn.Module, channels: int, side: int) -> Work:
    """Count the work of a model, on the CPU.

    Operations are those of convolutions and matrix products. Bytes are in bf16: forward, each layer reads its input and
    writes its output; backward, it reads its input and the output's gradient and writes the input's gradient. Weights
    and the optimizer's state, which a batch shares, are not counted. Fused layers move fewer bytes.
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
