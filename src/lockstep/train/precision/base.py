"""The base precision: everything in float32, no loss scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer


class Precision:
    """What the training loop asks of a precision, done for float32."""

    name = "fp32"
    input_dtype = torch.float32

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model with its parameters in this precision."""
        return model

    def autocast(self) -> AbstractContextManager[object]:
        """Around the forward pass and the loss."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar loss."""
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Make the gradients true to size, for clipping."""

    def step(self, optimizer: Optimizer) -> None:
        """Take the optimizer's step."""
        optimizer.step()
