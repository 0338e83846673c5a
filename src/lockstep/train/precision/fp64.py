"""Double precision, to check results: rounding differences between runs stay negligible."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.train.precision.base import Precision


class Double(Precision):
    """Model, images and optimizer state in float64."""

    name = "fp64"
    input_dtype = torch.float64
    loss_dtype = torch.float64

    def prepare(self, model: nn.Module) -> nn.Module:
        return model.double()
