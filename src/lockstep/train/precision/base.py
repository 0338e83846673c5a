"""The base precision: everything in float32, no loss scaling."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Precision:
    """What the training loop asks of a precision, done for float32."""

    name = "fp32"
    input_dtype = torch.float32
    loss_dtype = torch.float32
    """Logits are converted to it before the loss, which is summed in it."""
    loss_scale = 1.0
    """What the loss is multiplied with at present."""
    adapts_loss_scale = False
    """Whether an overflow lowers it."""
    found_inf: torch.Tensor | None = None
    """Where the device decides whether a step is taken: 1 if it skips the one at hand, else 0 (float32, a scalar)."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model with its parameters in this precision."""
        return model

    def weights_of(self, model: nn.Module) -> nn.Module:
        """The module whose parameters the optimizer changes and checkpoints hold: the model, or its copy in float32.

        `model` is prepared and on its device.
        """
        return model

    def autocast(self) -> AbstractContextManager[object]:
        """Around the forward pass and the loss."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar loss."""
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Give the optimizer's parameters their gradients, true to size."""

    def step(self, optimizer: Optimizer) -> bool | None:
        """Take the optimizer's step; False if it was skipped because a gradient is infinite or not a number.

        None: the device decides by `found_inf`, and `outcome` tells.
        """
        optimizer.step()
        return True

    def outcome(self, optimizer: Optimizer) -> bool | None:
        """What `step` left to the device, read once, before the next `step`; None: nothing. It waits for that step."""
        return None

    def refresh(self) -> None:
        """After weights were loaded: make the model follow them."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must remember, as JSON holds it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same precision."""
