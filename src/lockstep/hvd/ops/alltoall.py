"""All-to-all: each worker sends a part of its tensor to every worker, and receives a part from every worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.engine.exchange import CollectiveContext
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.ops.submission import handle_of, submit
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor


class Alltoall(Collective, kind="alltoall"):
    """Sends rows to each worker, point to point.

    Args:
        splits: The number of rows for each worker; may differ between workers.
    """

    __slots__ = ("splits",)
    free_rows = True

    def __init__(self, name: str, tensors: Sequence[Tensor], splits: list[int], **options: Any) -> None:
        super().__init__(name, tensors, (), **options)
        self.splits = splits

    def execute(self, exchange: CollectiveContext) -> tuple[Tensor, Tensor]:
        tensor, splits = self.tensors[0].contiguous(), self.splits
        received = [numbers[exchange.rank] for numbers in exchange.numbers(splits)]
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        exchange.transfers.all_to_all(output.split(received), tensor[: sum(splits)].split(splits))
        return output, torch.tensor(received, dtype=torch.int32, device="cpu")


def _submit(
    tensor: Tensor, splits: Tensor | None, name: str | None, process_set: ProcessSet, urgent: bool = False
) -> Alltoall:
    rows = _checked_splits(tensor, splits, process_set)
    return submit(Alltoall, [tensor], name, process_set, splits=rows, urgent=urgent)


def _checked_splits(tensor: Any, splits: Any, process_set: ProcessSet) -> list[int]:
    """Return the number of rows for each worker.

    Raises:
        ValueError: The splits do not fit the tensor or the process set.
    """
    if not isinstance(tensor, Tensor) or process_set.process_set_id is None:
        return []  # `submit` raises
    if tensor.dim() == 0:
        raise ValueError("alltoall needs a tensor with at least one dimension, got a scalar")
    size, rows = process_set.size() or 1, tensor.shape[0]
    if splits is None or (isinstance(splits, Tensor) and splits.numel() == 0):
        if rows % size:
            raise ValueError(f"alltoall cannot split {rows} rows evenly over {size} workers; pass splits")
        return [rows // size] * size
    if not isinstance(splits, Tensor):
        splits = torch.tensor(splits, dtype=torch.int32, device="cpu")
    if splits.dtype != torch.int32 or splits.dim() != 1:
        raise ValueError(f"alltoall expects splits to be a 1-D int32 tensor, got {splits.dim()}-D {splits.dtype}")
    counts: list[int] = splits.tolist()
    if len(counts) != size:
        raise ValueError(f"alltoall expects one split per worker, {size} in total, got {len(counts)}")
    if min(counts) < 0 or sum(counts) > rows:
        raise ValueError(f"alltoall splits {counts} must be >= 0 and sum to at most the tensor's {rows} rows")
    return counts


class _DifferentiableAlltoall(torch.autograd.Function):
    """Gradients are sent back to the worker that the rows came from; rows that were not sent get zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Tensor | None, name: str | None, process_set: ProcessSet) -> Any:
        output, received = _submit(tensor, splits, name, process_set, urgent=True).wait()
        ctx.arguments = tensor.shape[0], received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, received, process_set = ctx.arguments
        returned, _ = _submit(gradients[0], received, None, process_set, urgent=True).wait()
        dropped = returned.new_zeros((rows - returned.shape[0], *returned.shape[1:]))
        return torch.cat([returned, dropped]), None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send consecutive rows of a tensor to the workers, in order of rank. Differentiable.

    Args:
        tensor: The same dtype and shape on all workers, except for the first dimension.
        splits: int32 [size], the number of rows for each worker; remaining rows are not sent. None splits evenly.

    Returns:
        The received rows in order of rank; with `splits`, also int32 [size], the number of rows from each worker.

    Raises:
        ValueError: The splits do not fit the tensor, or it is a scalar; also as `allreduce`.
        HorovodInternalError, TypeError, AttributeError: As `allreduce`.
    """
    if torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad:
        pair = _DifferentiableAlltoall.apply(tensor, splits, name, process_set)
    else:
        pair = _submit(tensor, splits, name, process_set, urgent=True).wait()
    output: Tensor = pair[0]
    return output if splits is None else (output, pair[1])


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `alltoall`, not differentiable; return a handle, whose result is always the pair."""
    return handle_of(_submit(tensor, splits, name, process_set))
