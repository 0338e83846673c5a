"""DataParallel: one process drives all GPUs it sees, each with a part of every batch."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.train.strategies.base import Strategy


class DataParallelStrategy(Strategy):
    """torch's nn.DataParallel; with one GPU or none it is the plain module. The batch is the whole process's."""

    name = "dp"

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model) if torch.cuda.device_count() > 1 and _is_on_gpu(model) else model


def _is_on_gpu(model: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in model.parameters())
