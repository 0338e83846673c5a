"""In which number format a step computes: one precision a file; `base.py` is single precision."""

from __future__ import annotations

from lockstep.config import TrainConfig
from lockstep.train.precision.base import Precision

__all__ = ["Precision", "build_precision"]


def build_precision(config: TrainConfig, device_type: str) -> Precision:
    """The precision that a configuration names, on "cpu" or "cuda"."""
    if config.numerics.precision == "bf16":
        from lockstep.train.precision.bf16 import Bfloat16

        return Bfloat16(device_type)
    if config.numerics.precision == "fp64":
        from lockstep.train.precision.fp64 import Double

        return Double()
    return Precision()
