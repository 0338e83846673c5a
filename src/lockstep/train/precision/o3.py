"""O3: everything in fp16, including the weights that the optimizer updates; as a baseline for speed."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.train.precision.scaling import ScaledPrecision


class Half(ScaledPrecision):
    """Model, images, gradients and optimizer state in float16; batch norm optionally in float32."""

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
