"""O3: everything in fp16, for what speed alone would be; the optimizer changes fp16 weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.train.precision.scaling import ScaledPrecision


class Half(ScaledPrecision):
    """Model, images, gradients and optimizer state in float16; batch norm in float32 if asked for."""

    name = "O3"
    input_dtype = torch.float16

    def __init__(self, device_type: str, loss_scale: float | Literal["dynamic"], keep_batchnorm_fp32: bool):
        super().__init__(loss_scale, device_type)
        self._keep_batchnorm = keep_batchnorm_fp32

    def prepare(self, model: nn.Module) -> nn.Module:
        return halve(model, self._keep_batchnorm)


def halve(model: nn.Module, keep_batchnorm_fp32: bool) -> nn.Module:
    """The model in float16, with the parameters and statistics of batch norm in float32 if they are to be kept."""
    norms = [module for module in model.modules() if keep_batchnorm_fp32 and isinstance(module, _BatchNorm)]
    exact = [{name: tensor.clone() for name, tensor in norm.state_dict().items()} for norm in norms]
    model.half()
    for norm, state in zip(norms, exact, strict=True):
        norm.float().load_state_dict(state)  # a variance of 1e-9, or of 1e5, would not survive the way through fp16
    return model
