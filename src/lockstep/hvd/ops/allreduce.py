"""All-reduce: every worker gets the average, sum or another reduction of all workers' tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from lockstep.hvd.compression import Compression, Compressor, send_compressed
from lockstep.hvd.engine import context as engine
from lockstep.hvd.engine.fusion import Allreduce
from lockstep.hvd.engine.request import ADASUM, AVERAGE, OPERATION_NAMES, SUM
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.ops.submission import differentiable, handle_of, submit
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor
Factors = tuple[float, float]  # the factors before and after a reduction


def resolve_operation(op: int | None, average: bool | None) -> int:
    """Return the operation for `op` or the deprecated `average`; Average if both are None.

    Raises:
        ValueError: Both are given.
        TypeError: `op` is not an integer.
        HorovodInternalError: `op` is out of range.
    """
    if average is not None:
        warnings.warn("Parameter `average` is deprecated; use op=hvd.Average or op=hvd.Sum", DeprecationWarning, 3)
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return AVERAGE if average else SUM
    if op is None:
        return AVERAGE
    if not isinstance(op, int):
        raise TypeError(f"op must be hvd.Average, Sum, Adasum, Min, Max or Product, got {op!r}")
    if not 0 <= op < len(OPERATION_NAMES):
        raise HorovodInternalError(f"unknown reduction operation {op}")
    return op


def check_adasum(op: int, process_set: ProcessSet) -> None:
    """Check the process set for Adasum, which combines workers pairwise.

    Raises:
        NotImplementedError: `op` is Adasum and the set is not global, or its size is not a power of 2.
    """
    if op != ADASUM:
        return
    size = engine.get_for_operation().rank_info.size
    if process_set.process_set_id != 0:
        raise NotImplementedError("Adasum does not support non-global process sets.")
    if size & (size - 1):
        raise NotImplementedError(f"Adasum needs a power of 2 as the number of workers, got {size}.")


def _submit(
    tensors: Sequence[Tensor], name: str | None, op: int, scales: Factors, process_set: ProcessSet, **options: bool
) -> Allreduce:
    check_adasum(op, process_set)
    if not tensors:
        raise ValueError("a grouped allreduce needs at least one tensor")
    prescale, postscale = scales
    return submit(
        Allreduce, tensors, name, process_set, operation=op, prescale=prescale, postscale=postscale, **options
    )


def _reduce(
    tensors: Sequence[Tensor], grouped: bool, name: str | None, op: int, scales: Factors, process_set: ProcessSet
) -> Any:
    """All-reduce tensors; their gradients are all-reduced in the same way."""

    def run(tensors: Sequence[Tensor]) -> Any:
        return _submit(tensors, name, op, scales, process_set, grouped=grouped, urgent=True).wait()

    def gradients_of(gradients: Sequence[Tensor], _: object) -> Sequence[Tensor]:
        reduced = _reduce(gradients, grouped, None, op, scales, process_set)
        return reduced if grouped else [reduced]

    return differentiable(run, gradients_of, tensors)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all workers. Differentiable.

    Args:
        tensor: The same shape and dtype on all workers: float16, bfloat16, float32, float64, int32, int64 or bool.
        average: Deprecated; True is op=Average, False is op=Sum.
        name: Matches the operation between workers; None numbers it.
        compression: For communication, such as `Compression.fp16`.
        op: Average (the default), Sum, Adasum, Min, Max or Product. Averages of integers are truncated toward zero.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The workers that take part.

    Returns:
        A tensor of the same shape, dtype and device.

    Raises:
        HorovodInternalError: The requests do not match, a worker disconnected, or Horovod is not initialized.
        ValueError: The dtype is not supported, the name is already pending, or this worker is not in the set.
        TypeError, AttributeError, NotImplementedError: Invalid arguments, see docs/reference/horovod.md.
    """
    op = resolve_operation(op, average)
    compressed, ctx = compression.compress(tensor)
    scales = prescale_factor, postscale_factor
    return compression.decompress(_reduce([compressed], False, name, op, scales, process_set), ctx)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce`, not differentiable; return a handle for `poll` and `synchronize`."""
    op = resolve_operation(op, average)
    return handle_of(_submit([tensor], name, op, (prescale_factor, postscale_factor), process_set))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Run `allreduce` in place, not differentiable; return the tensor itself."""
    op = resolve_operation(op, average)
    request = _submit([tensor], name, op, (prescale_factor, postscale_factor), process_set, in_place=True, urgent=True)
    result: Tensor = request.wait()
    return result


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce_`; return a handle. Do not use the tensor before `synchronize` returns."""
    op = resolve_operation(op, average)
    return handle_of(_submit([tensor], name, op, (prescale_factor, postscale_factor), process_set, in_place=True))


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Run `allreduce` on a list of tensors as one operation; dtypes may differ. Differentiable."""
    op = resolve_operation(op, average)
    scales = prescale_factor, postscale_factor
    reduce = partial(_reduce, grouped=True, name=name, op=op, scales=scales, process_set=process_set)
    return send_compressed(reduce, tensors, compression)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce`, not differentiable; return a handle, whose result is a tuple."""
    op = resolve_operation(op, average)
    return handle_of(_submit(tensors, name, op, (prescale_factor, postscale_factor), process_set, grouped=True))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Run `grouped_allreduce` in place, not differentiable."""
    op = resolve_operation(op, average)
    request = _submit(
        tensors, name, op, (prescale_factor, postscale_factor), process_set, grouped=True, in_place=True, urgent=True
    )
    result: tuple[Tensor, ...] = request.wait()
    return result


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce_`; return a handle, whose result is a tuple."""
    op = resolve_operation(op, average)
    request = _submit(tensors, name, op, (prescale_factor, postscale_factor), process_set, grouped=True, in_place=True)
    return handle_of(request)
