"""DataParallel: one process uses all visible GPUs, each with a part of every batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from lockstep.train.strategies.base import Strategy
from lockstep.world import accelerator


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
