"""Reduce-scatter: the workers' tensors are reduced, and each worker gets a part of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.compression import Compression, Compressor
from lockstep.hvd.engine.exchange import CollectiveContext
from lockstep.hvd.engine.reduction import (
    AVERAGE,
    SUM,
    WIRE_TYPES,
    reduce_rows,
    scale_,
)
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.ops.allgather import allgather
from lockstep.hvd.ops.allreduce import ReducingCollective, resolve_operation
from lockstep.hvd.ops.submission import handle_of, submit
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor
Scales = tuple[float, float]


class Reducescatter(ReducingCollective, kind="reducescatter"):
    """Each worker receives its rows of all workers' tensors and reduces them itself, in order of rank."""

    __slots__ = ()

    def execute(self, exchange: CollectiveContext) -> Any:
        outputs = [self._scatter(tensor, exchange) for tensor in self.tensors]
        return tuple(outputs) if self.grouped else outputs[0]

    def _scatter(self, tensor: Tensor, exchange: CollectiveContext) -> Tensor:
        operation, prescale, postscale = self.reduction
        wire = tensor.to(WIRE_TYPES.get(tensor.dtype, tensor.dtype))
        scaled = wire.clone(memory_format=torch.contiguous_format) if prescale != 1 else wire.contiguous()
        scale_(scaled, prescale)
        counts = rows_of_each(tensor.shape[0], exchange.size)
        pieces = wire.new_empty((exchange.size, counts[exchange.rank], *tensor.shape[1:]))
        exchange.transfers.all_to_all(list(pieces), scaled.split(counts))
        output = reduce_rows(pieces, SUM)
        scale_(output, postscale, exchange.size if operation == AVERAGE else 1)
        return output.to(tensor.dtype)


def rows_of_each(rows: int, size: int) -> list[int]:
    """Return how many of `rows` each of `size` workers gets; the first workers get one more if needed."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _submit(
    tensors: Sequence[Tensor], name: str | None, op: int, scales: Scales, process_set: ProcessSet, **options: bool
) -> Reducescatter:
    op = resolve_operation(op, None)
    if op not in (AVERAGE, SUM):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    if not tensors:
        raise ValueError("a grouped reducescatter needs at least one tensor")
    if any(isinstance(tensor, Tensor) and tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter needs tensors with at least one dimension, got a scalar")
    prescale, postscale = scales
    return submit(
        Reducescatter, tensors, name, process_set, operation=op, prescale=prescale, postscale=postscale, **options
    )


class _DifferentiableReducescatter(torch.autograd.Function):
    """The gradient is the concatenation of the workers' gradients of their rows."""

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
        return _DifferentiableReducescatter.apply(grouped, name, op, scales, process_set, *tensors)
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
    """Reduce a tensor over the workers and return this worker's part of the rows. Differentiable.

    Args:
        tensor: [rows, ...], the same shape and dtype on all workers. If the number of workers does not divide the
            rows, the first workers get one row more.
        op: Average or Sum.

    Returns:
        This worker's rows of the result.

    Raises:
        HorovodInternalError: `op` is not supported; also as `allreduce`.
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
    """Start a `reducescatter`, not differentiable; return a handle."""
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
    """Run `reducescatter` on a list of tensors as one operation. Differentiable."""
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
    """Start a `grouped_reducescatter`, not differentiable; return a handle, whose result is a tuple."""
    return handle_of(_submit(tensors, name, op, (prescale_factor, postscale_factor), process_set, grouped=True))
