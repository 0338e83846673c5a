"""Number formats of training: `base` without loss scaling (fp32 or O0, fp64, bf16), `half` with it (O1, O2, O3)."""

from __future__ import annotations

from lockstep.config.schema import NumericsConfig
from lockstep.train.precision.base import Bfloat16, Double, Precision
from lockstep.train.precision.half import AutocastHalf, Half, MasterWeights

__all__ = ["Precision", "build_precision"]


def build_precision(config: NumericsConfig, device_type: str) -> Precision:
    """Build the configured precision for a type of device."""
    name, keep = config.precision, config.keep_batchnorm_fp32
    if name == "bf16":
        return Bfloat16(device_type)
    if name == "fp64":
        return Double()
    if name == "O1":
        return AutocastHalf(device_type, config.loss_scale or "dynamic")
    if name == "O2":
        return MasterWeights(device_type, config.loss_scale or "dynamic", keep_batchnorm_fp32=keep is not False)
    if name == "O3":
        return Half(device_type, config.loss_scale or 1.0, keep_batchnorm_fp32=bool(keep))
    return Precision()
