"""Loss scaling: fp16 cannot hold values below 6e-8, so the loss is scaled up before backward and gradients down after.

P. Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2; initial scale, growth factor and
interval are those of Apex. torch's GradScaler does the same for float32 gradients, but rejects fp16 gradients (O3),
does not report skipped steps, and synchronizes with the device in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.train.optim.build import step_unless, take_back, takes_found_inf
from lockstep.train.precision.base import Precision
from lockstep.world import accelerator

FIRST = 2.0**16
LARGEST = 2.0**24
FACTOR = 2.0
INTERVAL = 2000  # steps without overflow after which the scale grows


class LossScaler:
    """The loss scale: halved after an overflow, doubled after `INTERVAL` steps without one."""

    def __init__(self, setting: float | Literal["dynamic"]):
        self.is_dynamic = setting == "dynamic"
        self.scale = FIRST if setting == "dynamic" else float(setting)
        self._good_steps = 0
        self._is_finite = True

    found_inf: torch.Tensor | None = None
    """1 if `unscale_` found an overflow, else 0: float32, a scalar on the device; None: known on the host."""

    def scaled(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the factors of the losses times the scale."""
        return factors * self.scale

    def unscale_(self, gradients: list[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place, and check that all are finite."""
        if self.scale != 1.0:
            torch._foreach_mul_(gradients, 1 / self.scale)
        # The largest magnitude cannot overflow as a sum could, and is NaN if any element is.
        self._is_finite = bool(nn.utils.get_total_norm(gradients, norm_type=float("inf")).isfinite())

    def update(self) -> bool:
        """Adjust the scale after `unscale_`, and return whether to take the step."""
        finite, self._is_finite = self._is_finite, True
        if self.is_dynamic:
            self._good_steps = self._good_steps + 1 if finite else 0
            if not finite:
                self.scale /= FACTOR
            elif self._good_steps == INTERVAL:
                self.scale, self._good_steps = min(LARGEST, self.scale * FACTOR), 0
        return finite

    def outcome(self) -> bool | None:
        """Return whether the device took the last step; None if `update` already returned it."""
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.is_dynamic:  # a fixed scale comes from the configuration
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])


class DeviceLossScaler(LossScaler):
    """The loss scale, updated on the device; `scale` and the state are those of the last `outcome`.

    A step's values are copied to the host asynchronously. If they are read after the next backward pass is enqueued,
    the device stays busy.
    """

    def __init__(self, setting: float | Literal["dynamic"]):
        super().__init__(setting)
        self._device_scale: torch.Tensor | None = None
        self._device_good_steps = torch.zeros(())
        self._coming: tuple[torch.Tensor, torch.Event] | None = None

    def scaled(self, factors: torch.Tensor) -> torch.Tensor:
        if self._device_scale is None:
            self._device_scale = torch.full((), self.scale, dtype=torch.float32, device=factors.device)
            self._device_good_steps = torch.full((), self._good_steps, dtype=torch.int32, device=factors.device)
        return factors * self._device_scale

    def unscale_(self, gradients: list[torch.Tensor]) -> None:
        assert self._device_scale is not None, "no loss was scaled"
        self.found_inf = torch.zeros_like(self._device_scale)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found_inf, self._device_scale.reciprocal())

    def update(self) -> bool:
        """Adjust the scale on the device. Return True, because `found_inf` decides there."""
        scale, good_steps, found_inf = self._device_scale, self._device_good_steps, self.found_inf
        assert scale is not None
        assert found_inf is not None
        if self.is_dynamic:
            torch._amp_update_scale_(scale, good_steps, found_inf, FACTOR, 1 / FACTOR, INTERVAL)
            scale.clamp_(max=LARGEST)
        figures = torch.stack([1 - found_inf, scale, good_steps.float()]).to("cpu", non_blocking=True)
        copied = accelerator.new_event(scale.device)
        accelerator.current_stream(scale.device).record_event(copied)
        self._coming = figures, copied
        return True

    def outcome(self) -> bool | None:
        if self._coming is None:
            return None
        (figures, copied), self._coming = self._coming, None
        copied.synchronize()
        finite, scale, good_steps = figures.tolist()
        if self.is_dynamic:
            self.scale, self._good_steps = scale, int(good_steps)
        return bool(finite)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._device_scale = self._coming = None


class ScaledPrecision(Precision):
    """The base of the fp16 precisions: scales the loss, and skips steps with an overflow."""

    def __init__(self, loss_scale: float | Literal["dynamic"], device_type: str = "cpu"):
        on_device = accelerator.overlaps(torch.device(device_type))
        self._scaler = DeviceLossScaler(loss_scale) if on_device else LossScaler(loss_scale)

    @property
    def loss_scale(self) -> float:  # type: ignore[override]
        return self._scaler.scale

    @property
    def adapts_loss_scale(self) -> bool:  # type: ignore[override]
        return self._scaler.is_dynamic

    def backward(self, losses: torch.Tensor, factors: torch.Tensor | None = None) -> None:
        losses.backward(self._scaler.scaled(torch.ones_like(losses) if factors is None else factors))

    def unscale(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._scaler.unscale_([parameter.grad for parameter in parameters if parameter.grad is not None])

    @property
    def found_inf(self) -> torch.Tensor | None:  # type: ignore[override]
        return self._scaler.found_inf

    def step(self, optimizer: Optimizer) -> bool | None:
        found_inf = self._scaler.found_inf
        if found_inf is not None and takes_found_inf(optimizer):
            step_unless(optimizer, found_inf)
            self._scaler.update()
            return None
        taken = self._scaler.update()
        if found_inf is not None:
            taken = bool(self._scaler.outcome())  # synchronizes, because only the host can skip this optimizer
        if taken:
            optimizer.step()
        return taken

    def outcome(self, optimizer: Optimizer) -> bool | None:
        taken = self._scaler.outcome()
        if taken is False:
            take_back(optimizer)
        return taken

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(state)
