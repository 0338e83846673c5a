"""Number formats of training: float32 (O0), TF32, float64 and bfloat16, and Apex's O1 to O3, float16 with loss scaling.

fp16 cannot hold values below 6e-8, so the loss is scaled up before the backward pass and gradients down after
(P. Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2; initial scale, growth factor and
interval are those of Apex). torch's GradScaler does the same for float32 gradients, but rejects fp16 gradients (O3),
does not report skipped steps, and synchronizes with the device in each step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lockstep.config.schema import NumericsConfig
from lockstep.errors import ConfigError
from lockstep.models.buffers import load_state, unexpanded
from lockstep.models.nested import cast
from lockstep.train.optim.build import gradients_of, step_unless, take_back, takes_found_inf
from lockstep.world import accelerator


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


class TensorFloat32(Precision):
    """float32, but matrix products round their inputs to TF32, which has 10 bits after the point, for tensor cores.

    torch does the same in convolutions by default.
    """

    name = "tf32"

    def autocast(self) -> AbstractContextManager[object]:
        return accelerator.tf32_products()

    def backward(self, losses: torch.Tensor, factors: torch.Tensor | None = None) -> None:
        with accelerator.tf32_products():
            super().backward(losses, factors)


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


FIRST = 2.0**16
LARGEST = 2.0**24
FACTOR = 2.0


class LossScaler:
    """The loss scale: halved after an overflow, doubled after `interval` steps without one."""

    interval = 2000

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
            elif self._good_steps == self.interval:
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
            torch._amp_update_scale_(scale, good_steps, found_inf, FACTOR, 1 / FACTOR, self.interval)
            scale.clamp_(max=LARGEST)
        figures = torch.stack([1 - found_inf, scale, good_steps.float()]).to("cpu", non_blocking=True)
        self._coming = figures, accelerator.current_stream(scale.device).record_event()
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

    def __init__(self, device_type: str, loss_scale: float | Literal["dynamic"]):
        self._device_type = device_type
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
        self._scaler.unscale_(gradients_of(optimizer))

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


class AutocastHalf(ScaledPrecision):
    """O1: float16 for the operations that torch's autocast considers safe; weights and gradients stay in float32.

    Apex's O1 patched functions to the same effect. Source: https://docs.pytorch.org/docs/stable/amp.html.
    """

    name = "O1"

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device_type, dtype=torch.float16)


class MasterWeights(ScaledPrecision):
    """O2: a float16 model, with batch norm in float32 by default, and float32 master weights.

    Forward and backward run in float16. The optimizer updates a float32 copy of the model, because updates may be too
    small for float16 weights (P. Micikevicius et al., arXiv 1710.03740, section 3.1). Checkpoints store the copy, so
    they have the same format as in other precisions.
    """

    name = "O2"
    input_dtype = torch.float16

    def __init__(self, device_type: str, loss_scale: float | Literal["dynamic"], keep_batchnorm_fp32: bool):
        super().__init__(device_type, loss_scale)
        self._keep_batchnorm = keep_batchnorm_fp32
        self._exact: dict[str, torch.Tensor] = {}
        self._parameters: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prepare(self, model: nn.Module) -> nn.Module:
        self._exact = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return halve(model, self._keep_batchnorm)

    def weights_of(self, model: nn.Module) -> nn.Module:
        full = copy.deepcopy(model).float()
        load_state(full, self._exact)  # the weights before rounding to fp16
        self._exact = {}
        full.register_forward_pre_hook(_in_float)
        self._parameters = list(zip(model.parameters(), full.parameters(), strict=True))
        self._buffers = list(zip(map(unexpanded, model.buffers()), map(unexpanded, full.buffers()), strict=True))
        return full

    def unscale(self, optimizer: Optimizer) -> None:
        for half, full in self._parameters:
            if half.grad is None:
                full.grad = None
            elif full.grad is None:
                full.grad = torch.empty_like(full)
        _copy([(half.grad, full.grad) for half, full in self._parameters])
        super().unscale(optimizer)

    def step(self, optimizer: Optimizer) -> bool | None:
        taken = super().step(optimizer)
        if taken is not False:  # if the device skipped the step, the weights are unchanged
            _copy([(full, half) for half, full in self._parameters])
        _copy(self._buffers)
        return taken

    def refresh(self) -> None:
        _copy([(full, half) for half, full in [*self._parameters, *self._buffers]])


class Half(ScaledPrecision):
    """O3: model, images, gradients and optimizer state in float16; batch norm optionally in float32.

    A baseline for speed.
    """

    name = "O3"
    input_dtype = torch.float16

    def __init__(self, device_type: str, loss_scale: float | Literal["dynamic"], keep_batchnorm_fp32: bool):
        super().__init__(device_type, loss_scale)
        self._keep_batchnorm = keep_batchnorm_fp32

    def prepare(self, model: nn.Module) -> nn.Module:
        return halve(model, self._keep_batchnorm)


def halve(model: nn.Module, keep_batchnorm_fp32: bool) -> nn.Module:
    """Convert the model to float16, optionally except for the parameters and statistics of batch norms."""
    norms = [module for module in model.modules() if keep_batchnorm_fp32 and isinstance(module, _BatchNorm)]
    exact = [{name: tensor.clone() for name, tensor in norm.state_dict().items()} for norm in norms]
    model.half()
    for norm, state in zip(norms, exact, strict=True):
        norm.float().load_state_dict(state)  # undoes rounding to fp16, which cannot hold a variance of 1e-9 or 1e5
    return model


def _copy(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
    """Copy the first tensor of each pair into the second; pairs of None are ignored."""
    sources, targets = [s for s, _ in pairs if s is not None], [t for _, t in pairs if t is not None]
    if sources:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


def _in_float(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Convert half-precision inputs to float32, to evaluate the float32 weights or their average."""
    return cast(inputs, torch.float32)


def build_precision(config: NumericsConfig, device: torch.device) -> Precision:
    """Return a configured precision.

    Raises:
        ConfigError: The device does not have it.
    """
    name, keep, device_type = config.precision, config.keep_batchnorm_fp32, device.type
    if name == "tf32":
        if reason := accelerator.why_no_tf32(device):
            raise ConfigError(f"--precision tf32: {reason}; use fp32 or bf16")
        return TensorFloat32()
    if name == "bf16":
        return Bfloat16(device_type)
    if name == "fp64":
        if accelerator.sum_dtype(device) != torch.float64:
            reason = f"{accelerator.name(device)} has no float64"
            raise ConfigError(f"--precision fp64: {reason}; use fp32, or add --device cpu")
        return Double()
    if name == "O1":
        return AutocastHalf(device_type, config.loss_scale or "dynamic")
    if name == "O2":
        return MasterWeights(device_type, config.loss_scale or "dynamic", keep_batchnorm_fp32=keep is not False)
    if name == "O3":
        return Half(device_type, config.loss_scale or 1.0, keep_batchnorm_fp32=bool(keep))
    return Precision()
