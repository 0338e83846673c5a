"""bfloat16 for the operations that torch's autocast considers safe; weights, gradients and sums stay in float32.

bfloat16 has the exponent range of float32, so the loss needs no scaling. Source:
https://docs.pytorch.org/docs/stable/amp.html.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from lockstep.train.precision.base import Precision


class Bfloat16(Precision):
    """Autocast to bfloat16 on one type of device."""

    name = "bf16"

    def __init__(self, device_type: str):
        self._device_type = device_type

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device_type, dtype=torch.bfloat16)
