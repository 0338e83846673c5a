"""Apex's levels O1, O2 and O3: float16 with loss scaling."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lockstep.train.precision.scaling import ScaledPrecision


class AutocastHalf(ScaledPrecision):
    """O1: float16 for the operations that torch's autocast considers safe; weights and gradients stay in float32.

    Apex's O1 patched functions to the same effect. Source: https://docs.pytorch.org/docs/stable/amp.html.
    """

    name = "O1"

    def __init__(self, device_type: str, loss_scale: float | Literal["dynamic"]):
        super().__init__(loss_scale, device_type)
        self._device_type = device_type

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
        super().__init__(loss_scale, device_type)
        self._keep_batchnorm = keep_batchnorm_fp32
        self._exact: dict[str, torch.Tensor] = {}
        self._parameters: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prepare(self, model: nn.Module) -> nn.Module:
        self._exact = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return halve(model, self._keep_batchnorm)

    def weights_of(self, model: nn.Module) -> nn.Module:
        full = copy.deepcopy(model).float()
        full.load_state_dict(self._exact)  # the weights before rounding to fp16
        self._exact = {}
        full.register_forward_pre_hook(_in_float)
        self._parameters = list(zip(model.parameters(), full.parameters(), strict=True))
        self._buffers = list(zip(model.buffers(), full.buffers(), strict=True))
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
        super().__init__(loss_scale, device_type)
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


def _in_float(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert half-precision images to float32, to evaluate the float32 weights or their average."""
    return tuple(value.float() if isinstance(value, torch.Tensor) else value for value in inputs)
