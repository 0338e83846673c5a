"""Reduce-scatter: the workers' tensors are reduced, and each worker gets a share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.compression import Compression, Compressor
from lockstep.hvd.engine.reduction import AVERAGE, SUM
from lockstep.hvd.engine.request import Request
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.ops.allgather import allgather
from lockstep.hvd.ops.allreduce import resolve_operation
from lockstep.hvd.ops.submission import handle_of, submit
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor
Scales = tuple[float, float]


def _submit(
    tensors: Sequence[Tensor], name: str | None, op: int, scales: Scales, process_set: ProcessSet, **details: Any
) -> Request:
    op = resolve_operation(op, None)
    if op not in (AVERAGE, SUM):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    if not tensors:
        raise ValueError("a grouped reducescatter needs at least one tensor")
    if any(isinstance(tensor, Tensor) and tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter shares out rows of the first dimension, and a scalar has none")
    prescale, postscale = scales
    return submit(
        "reducescatter", tensors, name, process_set, operation=op, prescale=prescale, postscale=postscale, **details
    )


class _Reducescatter(torch.autograd.Function):
    """The gradient is gathered from the workers, each of which has that of its rows."""

    @staticmethod
    def forward(
        ctx: Any, grouped: bool, name: str | None, op: int, scales: Scales, process_set: Any, *tensors: Any
    ) -> Any:
        ctx.arguments = op, scales, process_set
        return _submit(tensors, name, op, scales, process_set, grouped=grouped, urgent=True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, (prescale, postscale), process_set = ctx.arguments
        factor = prescale * postscale * (process_set.size() if op == SUM else 1)
        gathered = [allgather(gradient, process_set=process_set) * factor for gradient in gradients]
        return None, None, None, None, None, *gathered


def _scatter(
    tensors: Sequence[Tensor], grouped: bool, name: str | None, op: int, scales: Scales, process_set: ProcessSet
) -> Any:
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        return _Reducescatter.apply(grouped, name, op, scales, process_set, *tensors)
    return _submit(tensors, name, op, scales, process_set, grouped=grouped, urgent=True).wait()


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over the workers and give each its rows, with gradient.

    Args:
        tensor: [rows, ...] of the same shape and dtype on all workers. Where the rows do not divide, the first workers
            get one more.
        op: Average or Sum.

    Returns:
        This worker's rows of the result.

    Raises:
        HorovodInternalError: Another `op`; also as `allreduce`.
        ValueError: The tensor is a scalar; also as `allreduce`.
    """
    compressed, ctx = compression.compress(tensor)
    scales = prescale_factor, postscale_factor
    return compression.decompress(_scatter([compressed], False, name, op, scales, process_set), ctx)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin a `reducescatter` without gradient; returns a handle."""
    return handle_of(_submit([tensor], name, op, (prescale_factor, postscale_factor), process_set))


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of a list of tensors as one operation, with gradient."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    scales = prescale_factor, postscale_factor
    scattered = _scatter([tensor for tensor, _ in pairs], True, name, op, scales, process_set)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(scattered, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin a `grouped_reducescatter` without gradient; the handle's result is a tuple."""
    return handle_of(_submit(tensors, name, op, (prescale_factor, postscale_factor), process_set, grouped=True))
