"""All-to-all: each worker sends a part of its tensor to each, and gets a part from each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.engine.exchange import Exchange
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.ops.submission import handle_of, submit
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor


class Alltoall(Collective, kind="alltoall"):
    """Rows to and from each worker, point to point.

    Args:
        splits: Rows that go to each worker, which may differ between workers.
    """

    __slots__ = ("splits",)
    free_rows = True

    def __init__(self, name: str, tensors: Sequence[Tensor], splits: list[int], **options: bool) -> None:
        super().__init__(name, tensors, (), **options)
        self.splits = splits

    def execute(self, exchange: Exchange) -> tuple[Tensor, Tensor]:
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
    """Rows for each worker.

    Raises:
        ValueError: They do not fit the tensor or the process set.
    """
    if not isinstance(tensor, Tensor) or process_set.process_set_id is None:
        return []  # `submit` says what is wrong
    if tensor.dim() == 0:
        raise ValueError("alltoall sends rows of the first dimension, and a scalar has none")
    size, rows = process_set.size() or 1, tensor.shape[0]
    if splits is None or (isinstance(splits, Tensor) and splits.numel() == 0):
        if rows % size:
            raise ValueError(f"alltoall without splits needs rows that {size} workers can share evenly, not {rows}")
        return [rows // size] * size
    if not isinstance(splits, Tensor):
        splits = torch.tensor(splits, dtype=torch.int32)
    if splits.dtype != torch.int32 or splits.dim() != 1:
        raise ValueError(f"alltoall expects splits to be a 1-D tensor of int32, not {splits.dim()}-D {splits.dtype}")
    counts: list[int] = splits.tolist()
    if len(counts) != size:
        raise ValueError(f"alltoall expects one split a worker, {size} in all, not {len(counts)}")
    if min(counts) < 0 or sum(counts) > rows:
        raise ValueError(f"alltoall splits {counts} do not fit a tensor of {rows} rows")
    return counts


class _DifferentiableAlltoall(torch.autograd.Function):
    """The gradients travel back the way the rows came; rows that were not sent have none."""

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
    """Send consecutive rows of a tensor to the workers in order of rank, with gradient.

    Args:
        tensor: Of one dtype and shape on all workers, but for the first dimension.
        splits: int32 [size], the rows for each worker; where the sum is less than there are, the rest is not sent.
            None shares them evenly.

    Returns:
        The received rows in order of rank; with `splits` also int32 [size], how many came from each worker.

    Raises:
        ValueError: The splits do not fit, or the tensor is a scalar; also as `allreduce`.
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
    """Begin an `alltoall` without gradient; the handle's result is always the pair."""
    return handle_of(_submit(tensor, splits, name, process_set))
