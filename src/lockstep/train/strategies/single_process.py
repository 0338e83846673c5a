"""One process: the bare backward pass on one device, and DataParallel, which uses all visible GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from lockstep.train.strategies.base import Strategy
from lockstep.world import accelerator


@contextmanager
def bare_forward(module: nn.Module) -> Iterator[None]:
    """Make the module, called without arguments, return a scalar (float32, 0) that depends on all trained parameters.

    Gradients arrive in reverse order of definition, in one pass that runs the hooks of the module and its wrappers.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def touch_parameters() -> torch.Tensor:
        # Autograd runs the newest branch first, so the last parameter's gradient arrives first.
        return torch.stack([parameter.sum().float() * 0 for parameter in parameters]).sum()

    own_forward = vars(module).get("forward")
    module.forward = touch_parameters
    try:
        yield
    finally:
        del module.forward
        if own_forward is not None:
            module.forward = own_forward


class DataParallelStrategy(Strategy):
    """torch's nn.DataParallel; with at most one GPU, the plain module. The batch size is per process."""

    name = "dp"

    def wrap(self, model: nn.Module) -> nn.Module:
        kinds = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
        return Parallel(model, kinds.pop()) if kinds and accelerator.count() > 1 else model


class Parallel(nn.DataParallel[nn.Module]):
    """DataParallel whose threads autocast to the caller's dtype; torch's version uses the default, float16."""

    def __init__(self, model: nn.Module, device_type: str):
        super().__init__(CallersAutocast(model, device_type))

    def forward(self, *inputs: Any) -> Any:
        cast(CallersAutocast, self.module).follow()
        return super().forward(*inputs)


class CallersAutocast(nn.Module):
    """A module with the autocast settings of the thread that called `follow`."""

    def __init__(self, model: nn.Module, device_type: str):
        super().__init__()
        self.model = model
        self._device_type = device_type
        self.follow()

    def follow(self) -> None:
        """Read this thread's autocast settings."""
        self._enabled = torch.is_autocast_enabled(self._device_type)
        self._dtype = torch.get_autocast_dtype(self._device_type)

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=self._enabled):
            return self.model(*inputs)
