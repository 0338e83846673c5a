"""Number formats of training, one precision per file; `base.py` is single precision (fp32, O0)."""

from __future__ import annotations

from lockstep.config.schema import NumericsConfig
from lockstep.train.precision.base import Precision

__all__ = ["Precision", "build_precision"]


def build_precision(config: NumericsConfig, device_type: str) -> Precision:
    """Build the configured precision for a type of device."""
    name, keep = config.precision, config.keep_batchnorm_fp32
    if name == "bf16":
        from lockstep.train.precision.bf16 import Bfloat16

        return Bfloat16(device_type)
    if name == "fp64":
        from lockstep.train.precision.fp64 import Double

        return Double()
    if name == "O1":
        from lockstep.train.precision.o1 import AutocastHalf

        return AutocastHalf(device_type, config.loss_scale or "dynamic")
    if name == "O2":
        from lockstep.train.precision.o2 import MasterWeights

        return MasterWeights(device_type, config.loss_scale or "dynamic", keep_batchnorm_fp32=keep is not False)
    if name == "O3":
        from lockstep.train.precision.o3 import Half

        return Half(device_type, config.loss_scale or 1.0, keep_batchnorm_fp32=bool(keep))
    return Precision()
