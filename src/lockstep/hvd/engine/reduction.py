"""The arithmetic of reductions: operations, scale factors, and sums over the workers' rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
OPERATION_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
REDUCE_OPS = {AVERAGE: ReduceOp.SUM, SUM: ReduceOp.SUM, MIN: ReduceOp.MIN, MAX: ReduceOp.MAX, PRODUCT: ReduceOp.PRODUCT}
# bool is reduced as int32: Sum and Max are "any", Product, Min and Average are "all".
WIRE_TYPES = {torch.bool: torch.int32}
HALF_TYPES = (torch.float16, torch.bfloat16)


class Reduction(NamedTuple):
    """How tensors are reduced: the operation (AVERAGE to PRODUCT), and the factors before and after it."""

    operation: int
    prescale: float
    postscale: float


def scale_(tensor: torch.Tensor, factor: float, divisor: int = 1) -> None:
    """Multiply by factor / divisor in place; integers are truncated toward zero."""
    if factor == divisor:
        return
    if tensor.is_floating_point():
        if factor == 1:
            tensor.div_(divisor)
        else:
            tensor.mul_(factor / divisor)
    elif factor == 1:
        tensor.div_(divisor, rounding_mode="trunc")
    else:
        tensor.copy_(tensor.to(torch.float64).mul_(factor / divisor).trunc_())


def reduce_rows(rows: torch.Tensor, operation: int) -> torch.Tensor:
    """Reduce [workers, ...] over the workers, in order of rank. An average is only summed, not divided.

    The result has the rows' dtype, except that half-precision sums are float32, so that they do not overflow before
    the division.
    """
    if operation in (AVERAGE, SUM):
        return rows.sum(0, dtype=torch.float32 if rows.dtype in HALF_TYPES else rows.dtype)
    if operation == PRODUCT:
        return rows.prod(0, dtype=rows.dtype)
    return rows.amin(0) if operation == MIN else rows.amax(0)


def copy_scaled(tensor: torch.Tensor, output: torch.Tensor, factor: float, divisor: int = 1) -> None:
    """Write `tensor` times factor / divisor to `output`, which may be `tensor` itself."""
    if output is tensor:
        scale_(output, factor, divisor)
    elif tensor.is_floating_point() and factor / divisor != 1:
        torch.mul(tensor, factor / divisor, out=output)
    else:
        output.copy_(tensor)
        scale_(output, factor, divisor)
