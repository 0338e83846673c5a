"""The base strategy: one worker, whose gradients are already the whole batch's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.optim import Optimizer


class Strategy:
    """What the training loop asks of a strategy, done for a single worker."""

    name = "single"
    workers_averaged = 1
    """Workers over which gradients are averaged: what a loss must be scaled by for its mean to be over all samples."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training."""
        return model

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Around each forward and backward pass of a step; gradients need to travel in the last one only."""
        return nullcontext()

    def finish_gradients(self, optimizer: Optimizer) -> None:
        """After the last backward pass: gradients are complete when this returns."""

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Around the optimizer's step."""
        return nullcontext()

    def sync_buffers(self, model: nn.Module) -> None:
        """Give every replica rank 0's buffers, such as batch norm's running statistics."""
