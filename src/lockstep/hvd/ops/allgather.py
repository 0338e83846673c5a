"""All-gather: every worker gets all workers' tensors, concatenated along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.engine.exchange import Exchange
from lockstep.hvd.engine.reduction import AVERAGE
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.ops.allreduce import allreduce
from lockstep.hvd.ops.submission import handle_of, submit
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor


class Allgather(Collective, kind="allgather"):
    """Concatenates the workers' rows, in order of rank."""

    __slots__ = ()
    free_rows = True

    def execute(self, exchange: Exchange) -> Any:
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
