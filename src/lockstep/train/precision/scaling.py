"""Loss scaling: fp16 holds nothing below 6e-8, so the loss is multiplied before and gradients divided after backward.

P. Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2; first scale, growth and its interval
are those of Apex's levels. torch's GradScaler does the same for float32 gradients, but refuses fp16 ones (O3), does not
say when it skips a step, and waits for the device in each.
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
    """The loss scale and its course: halved by an overflow, doubled after `INTERVAL` steps without one."""

    def __init__(self, setting: float | Literal["dynamic"]):
        self.is_dynamic = setting == "dynamic"
        self.scale = FIRST if setting == "dynamic" else float(setting)
        self._good_steps = 0
        self._is_finite = True

    found_inf: torch.Tensor | None = None
    """1 where `unscale_` saw an overflow, else 0: float32, a scalar on the device; None: it is known on the host."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss * self.scale

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

    def outcome(self) -> bool | None:
        """Whether the last step may be taken, where `update` left that to the device; None: nothing to read."""
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.is_dynamic:  # a scale that the flags fix stays as they say
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])


class DeviceLossScaler(LossScaler):
    """The same course, followed by the device alone; `scale` and the state are those of the last `outcome`.

    The figures of a step are copied to the host behind its last kernel, so that reading them after the next backward
    pass was enqueued leaves the device busy.
    """

    def __init__(self, setting: float | Literal["dynamic"]):
        super().__init__(setting)
        self._device_scale: torch.Tensor | None = None
        self._device_good_steps = torch.zeros(())
        self._coming: tuple[torch.Tensor, torch.Event] | None = None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self._device_scale is None:
            self._device_scale = torch.full((), self.scale, dtype=torch.float32, device=loss.device)
            self._device_good_steps = torch.full((), self._good_steps, dtype=torch.int32, device=loss.device)
        return loss * self._device_scale

    def unscale_(self, gradients: list[torch.Tensor]) -> None:
        assert self._device_scale is not None, "no loss was scaled"
        self.found_inf = torch.zeros_like(self._device_scale)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found_inf, self._device_scale.reciprocal())

    def update(self) -> bool:
        """Adjust the scale on the device; True, for `found_inf` decides there."""
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
    """What the fp16 levels share: the scaled loss, and the step that an overflow skips."""

    def __init__(self, loss_scale: float | Literal["dynamic"], device_type: str = "cpu"):
        on_device = accelerator.overlaps(torch.device(device_type))
        self._scaler = DeviceLossScaler(loss_scale) if on_device else LossScaler(loss_scale)

    @property
    def loss_scale(self) -> float:  # type: ignore[override]
        return self._scaler.scale

    @property
    def adapts_loss_scale(self) -> bool:  # type: ignore[override]
        return self._scaler.is_dynamic

    def backward(self, loss: torch.Tensor) -> None:
        self._scaler.scaled(loss).backward()

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
            taken = bool(self._scaler.outcome())  # the one wait, for an optimizer that only the host can skip
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
