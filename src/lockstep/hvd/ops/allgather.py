"""All-gather: every worker gets all workers' tensors. Sparse gradients are reduced by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.hvd.engine.exchange import CollectiveContext
from lockstep.hvd.engine.reduction import AVERAGE, OPERATION_NAMES, SUM, scale_
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.ops.allreduce import allreduce
from lockstep.hvd.ops.submission import handle_of, submit, synchronize
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor


class Allgather(Collective, kind="allgather"):
    """Concatenates the workers' rows, in order of rank."""

    __slots__ = ()
    free_rows = True

    def execute(self, exchange: CollectiveContext) -> Any:
        rows = exchange.numbers([tensor.shape[0] for tensor in self.tensors])
        outputs = []
        for index, tensor in enumerate(map(Tensor.contiguous, self.tensors)):
            counts = [numbers[index] for numbers in rows]
            output = tensor.new_empty((sum(counts), *tensor.shape[1:]))
            if len(set(counts)) == 1:
                exchange.transfers.all_gather(output, tensor)
            else:
                exchange.transfers.all_to_all(output.split(counts), [tensor] * exchange.size)
            outputs.append(output)
        return tuple(outputs) if self.grouped else outputs[0]


def _submit(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, grouped: bool, urgent: bool = False
) -> Allgather:
    if not tensors:
        raise ValueError("a grouped allgather needs at least one tensor")
    if any(isinstance(tensor, Tensor) and tensor.dim() == 0 for tensor in tensors):
        raise IndexError("allgather needs tensors with at least one dimension, got a scalar")
    return submit(Allgather, tensors, name, process_set, grouped=grouped, urgent=urgent)


class _DifferentiableAllgather(torch.autograd.Function):
    """The gradient of a worker's rows is the average of all workers' gradients for these rows."""

    @staticmethod
    def forward(ctx: Any, grouped: bool, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return _submit(tensors, name, process_set, grouped, urgent=True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        counts = _submit([torch.tensor([ctx.rows], device="cpu")], None, ctx.process_set, False, urgent=True).wait()
        own = ctx.process_set.rank()
        parts = []
        for index, gradient in enumerate(gradients):
            reduced = allreduce(gradient, op=AVERAGE, process_set=ctx.process_set)
            parts.append(reduced.split(counts[:, index].tolist())[own])
        return None, None, None, *parts


def _gather(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, grouped: bool) -> Any:
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        return _DifferentiableAllgather.apply(grouped, name, process_set, *tensors)
    return _submit(tensors, name, process_set, grouped, urgent=True).wait()


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the workers' tensors along the first dimension, in order of rank. Differentiable.

    Args:
        tensor: The same dtype and shape on all workers, except for the first dimension, which may be 0.

    Returns:
        A tensor with the rows of all workers.

    Raises:
        IndexError: The tensor is a scalar.
        HorovodInternalError, ValueError, TypeError, AttributeError: As `allreduce`.
    """
    result: Tensor = _gather([tensor], name, process_set, False)
    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an `allgather`, not differentiable; return a handle."""
    return handle_of(_submit([tensor], name, process_set, False))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Run `allgather` on a list of tensors as one operation. Differentiable."""
    result: tuple[Tensor, ...] = _gather(tensors, name, process_set, True)
    return result


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `grouped_allgather`, not differentiable; return a handle, whose result is a tuple."""
    return handle_of(_submit(tensors, name, process_set, True))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the average or sum of a sparse COO tensor over the workers.

    Args:
        tensor: A sparse tensor, the same shape and dtype on all workers, with any number of entries.
        name: The two all-gathers are named NAME.indices and NAME.values.
        op: Average or Sum.

    Returns:
        A function that waits and returns the sparse result.

    Raises:
        ValueError: `op` is not supported; also as `allgather`.
        HorovodInternalError: As `allgather`.
    """
    if op not in (AVERAGE, SUM):
        raise ValueError(f"sparse tensors support op=Average and op=Sum, got {OPERATION_NAMES[op]}")
    entries = tensor if tensor.is_coalesced() else tensor.coalesce()
    indices = allgather_async(entries._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(entries._values(), f"{name}.values", process_set)

    def finish() -> torch.Tensor:
        all_indices, all_values = synchronize(indices), synchronize(values)
        if op == AVERAGE:
            scale_(all_values, 1, process_set.size() or 1)
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False).coalesce()

    return finish
