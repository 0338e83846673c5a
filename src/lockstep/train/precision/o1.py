"""O1: fp16 for the operations that torch's autocast considers safe; weights, gradients and sums stay in float32.

Apex's O1 patched functions to the same effect. Source: https://docs.pytorch.org/docs/stable/amp.html.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import torch

from lockstep.train.precision.scaling import ScaledPrecision


class AutocastHalf(ScaledPrecision):
    """Autocast to float16 on one type of device, with loss scaling."""

    name = "O1"

    def __init__(self, device_type: str, loss_scale: float | Literal["dynamic"]):
        super().__init__(loss_scale, device_type)
        self._device_type = device_type

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device_type, dtype=torch.float16)
