"""Precisions without loss scaling: float32, which is the interface of all, float64 and bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Precision:
    """The interface between the training loop and a precision; this one is float32."""

    name = "fp32"
    input_dtype = torch.float32
    loss_dtype = torch.float32
    """The dtype of the loss and of the logits passed to it."""
    loss_scale = 1.0
    """The current factor of the loss."""
    adapts_loss_scale = False
    """Whether an overflow lowers the loss scale."""
    found_inf: torch.Tensor | None = None
    """If the device decides whether to take a step: 1 to skip the current one, else 0 (float32, a scalar)."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model with its parameters in this precision."""
        return model

    def weights_of(self, model: nn.Module) -> nn.Module:
        """Return the module that the optimizer updates and checkpoints store: the model, or its float32 copy.

        `model` must be prepared and on its device.
        """
        return model

    def autocast(self) -> AbstractContextManager[object]:
        """Surround the forward pass and the loss."""
        return nullcontext()

    def backward(self, losses: torch.Tensor, factors: torch.Tensor | None = None) -> None:
        """Compute the gradients of the sum of losses [N] times factors [N], or of a single loss.

        This is the backward pass of that sum, without the operations that compute it.
        """
        losses.backward(factors)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the loss scale."""

    def step(self, optimizer: Optimizer) -> bool | None:
        """Take the optimizer's step. Return False if it was skipped because of a NaN or infinite gradient.

        Return None if the device decides by `found_inf`; `outcome` then has the result.
        """
        optimizer.step()
        return True

    def outcome(self, optimizer: Optimizer) -> bool | None:
        """Wait for the device and return whether it took the last step; None if `step` already returned that.

        Call it once, before the next `step`.
        """
        return None

    def refresh(self) -> None:
        """Update the model after weights were loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same precision."""


class Double(Precision):
    """Model, images and optimizer state in float64, so that rounding differences between runs stay negligible."""

    name = "fp64"
    input_dtype = torch.float64
    loss_dtype = torch.float64

    def prepare(self, model: nn.Module) -> nn.Module:
        return model.double()


class Bfloat16(Precision):
    """bfloat16 for the operations that torch's autocast considers safe; weights, gradients and sums stay in float32.

    bfloat16 has the exponent range of float32, so the loss needs no scaling. Source:
    https://docs.pytorch.org/docs/stable/amp.html.
    """

    name = "bf16"

    def __init__(self, device_type: str):
        self._device_type = device_type

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device_type, dtype=torch.bfloat16)
