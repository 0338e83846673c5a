"""Loss scaling: fp16 holds nothing below 6e-8, so the loss is multiplied before and gradients divided after backward.

P. Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2; first scale, growth and its interval
are those of Apex's levels. torch's GradScaler does the same for float32 gradients, but refuses fp16 ones (O3) and does
not say when it skips a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.train.precision.base import Precision

FIRST = 2.0**16
LARGEST = 2.0**24
FACTOR = 2.0
INTERVAL = 2000  # steps without overflow after which the scale grows


class LossScaler:
    """The loss scale and its course: halved by an overflow, doubled after `INTERVAL` steps without one."""

    def __init__(self, setting: float | Literal["dynamic"]):
        self.is_dynamic = setting == "dynamic"
        self.scale = FIRST if setting == "dynamic" else float(setting)
        self._good_steps = 0
        self._is_finite = True

    def unscale_(self, gradients: list[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place, and see whether all are finite."""
        if self.scale != 1.0:
            torch._foreach_mul_(gradients, 1 / self.scale)
        # The largest magnitude does not overflow as a sum would, and is NaN where any element is.
        self._is_finite = bool(nn.utils.get_total_norm(gradients, norm_type=float("inf")).isfinite())

    def update(self) -> bool:
        """Adjust the scale to what `unscale_` saw, and return whether the step may be taken."""
        finite, self._is_finite = self._is_finite, True
        if self.is_dynamic:
            self._good_steps = self._good_steps + 1 if finite else 0
            if not finite:
                self.scale /= FACTOR
            elif self._good_steps == INTERVAL:
                self.scale, self._good_steps = min(LARGEST, self.scale * FACTOR), 0
        return finite

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.is_dynamic:  # a scale that the flags fix stays as they say
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])


class ScaledPrecision(Precision):
    """What the fp16 levels share: the scaled loss, and the step that an overflow skips."""

    def __init__(self, loss_scale: float | Literal["dynamic"]):
        self._scaler = LossScaler(loss_scale)

    @property
    def loss_scale(self) -> float:  # type: ignore[override]
        return self._scaler.scale

    @property
    def adapts_loss_scale(self) -> bool:  # type: ignore[override]
        return self._scaler.is_dynamic

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self._scaler.scale).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._scaler.unscale_([parameter.grad for parameter in parameters if parameter.grad is not None])

    def step(self, optimizer: Optimizer) -> bool:
        taken = self._scaler.update()
        if taken:
            optimizer.step()
        return taken

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(state)
