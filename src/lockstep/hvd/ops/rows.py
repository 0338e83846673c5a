"""Collectives that move rows between workers: all-gather, reduce-scatter and all-to-all.

Sparse gradients are reduced by all-gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.hvd.compression import Compression, Compressor, send_compressed
from lockstep.hvd.engine.fusion import WIRE_TYPES, reduce_rows, scale_
from lockstep.hvd.engine.request import AVERAGE, OPERATION_NAMES, SUM, Collective, ReducingCollective
from lockstep.hvd.engine.transfers import SetConnections
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.ops.allreduce import Factors, allreduce, resolve_operation
from lockstep.hvd.ops.submission import differentiable, handle_of, submit, synchronize
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor


class Allgather(Collective, kind="allgather"):
    """Concatenates the workers' rows, in order of rank."""

    free_rows = True

    def execute(self, links: SetConnections) -> Any:
        rows = links.numbers([tensor.shape[0] for tensor in self.tensors])
        outputs = []
        for index, tensor in enumerate(map(Tensor.contiguous, self.tensors)):
            counts = [numbers[index] for numbers in rows]
            output = tensor.new_empty((sum(counts), *tensor.shape[1:]))
            if len(set(counts)) == 1:
                links.transfers.all_gather(output, tensor)
            else:
                links.transfers.all_to_all(output.split(counts), [tensor] * links.size)
            outputs.append(output)
        return tuple(outputs) if self.grouped else outputs[0]


def _submit_allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, grouped: bool, urgent: bool = False
) -> Allgather:
    if not tensors:
        raise ValueError("a grouped allgather needs at least one tensor")
    if any(isinstance(tensor, Tensor) and tensor.dim() == 0 for tensor in tensors):
        raise IndexError("allgather needs tensors with at least one dimension, got a scalar")
    return submit(Allgather, tensors, name, process_set, grouped=grouped, urgent=urgent)


def _gather(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, grouped: bool) -> Any:
    """All-gather; the gradient of a worker's rows is the average of all workers' gradients for these rows."""

    def run(tensors: Sequence[Tensor]) -> Any:
        return _submit_allgather(tensors, name, process_set, grouped, urgent=True).wait()

    def gradients_of(gradients: Sequence[Tensor], shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
        rows = torch.tensor([[shape[0] for shape in shapes]], device="cpu")
        counts = _submit_allgather([rows], None, process_set, False, urgent=True).wait().t().tolist()
        rank = process_set.rank() or 0
        return [
            allreduce(gradient, op=AVERAGE, process_set=process_set).split(rows_by_rank)[rank]
            for gradient, rows_by_rank in zip(gradients, counts, strict=True)
        ]

    return differentiable(run, gradients_of, tensors)


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
    return handle_of(_submit_allgather([tensor], name, process_set, False))


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
    return handle_of(_submit_allgather(tensors, name, process_set, True))


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


class Reducescatter(ReducingCollective, kind="reducescatter"):
    """Each worker receives its rows of all workers' tensors and reduces them itself, in order of rank."""

    def execute(self, links: SetConnections) -> Any:
        outputs = [self._scatter(tensor, links) for tensor in self.tensors]
        return tuple(outputs) if self.grouped else outputs[0]

    def _scatter(self, tensor: Tensor, links: SetConnections) -> Tensor:
        operation, prescale, postscale = self.reduction
        wire = tensor.to(WIRE_TYPES.get(tensor.dtype, tensor.dtype))
        scaled = wire.clone(memory_format=torch.contiguous_format) if prescale != 1 else wire.contiguous()
        scale_(scaled, prescale)
        counts = rows_of_each(tensor.shape[0], links.size)
        pieces = wire.new_empty((links.size, counts[links.rank], *tensor.shape[1:]))
        links.transfers.all_to_all(list(pieces), scaled.split(counts))
        output = reduce_rows(pieces, SUM)
        scale_(output, postscale, links.size if operation == AVERAGE else 1)
        return output.to(tensor.dtype)


def rows_of_each(rows: int, size: int) -> list[int]:
    """Return how many of `rows` each of `size` workers gets; the first workers get one more if needed."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _submit_reducescatter(
    tensors: Sequence[Tensor], name: str | None, op: int, scales: Factors, process_set: ProcessSet, **options: bool
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


def _scatter(
    tensors: Sequence[Tensor], grouped: bool, name: str | None, op: int, scales: Factors, process_set: ProcessSet
) -> Any:
    """Reduce-scatter; the gradient is the concatenation of the workers' gradients of their rows."""

    def run(tensors: Sequence[Tensor]) -> Any:
        return _submit_reducescatter(tensors, name, op, scales, process_set, grouped=grouped, urgent=True).wait()

    def gradients_of(gradients: Sequence[Tensor], _: object) -> Sequence[Tensor]:
        factor = scales[0] * scales[1] * ((process_set.size() or 1) if op == SUM else 1)
        return [allgather(gradient, process_set=process_set) * factor for gradient in gradients]

    return differentiable(run, gradients_of, tensors)


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
    return handle_of(_submit_reducescatter([tensor], name, op, (prescale_factor, postscale_factor), process_set))


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
    scales = prescale_factor, postscale_factor
    scatter = partial(_scatter, grouped=True, name=name, op=op, scales=scales, process_set=process_set)
    return send_compressed(scatter, tensors, compression)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter`, not differentiable; return a handle, whose result is a tuple."""
    return handle_of(
        _submit_reducescatter(tensors, name, op, (prescale_factor, postscale_factor), process_set, grouped=True)
    )


class Alltoall(Collective, kind="alltoall"):
    """Sends rows to each worker, point to point.

    Args:
        splits: The number of rows for each worker; may differ between workers.
    """

    free_rows = True

    def __init__(self, name: str, tensors: Sequence[Tensor], splits: list[int], **options: Any) -> None:
        super().__init__(name, tensors, (), **options)
        self.splits = splits

    def execute(self, links: SetConnections) -> tuple[Tensor, Tensor]:
        tensor, splits = self.tensors[0].contiguous(), self.splits
        received = [numbers[links.rank] for numbers in links.numbers(splits)]
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        links.transfers.all_to_all(output.split(received), tensor[: sum(splits)].split(splits))
        return output, torch.tensor(received, dtype=torch.int32, device="cpu")


def _submit_alltoall(
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


def alltoall(
    tensor: Tensor, splits: Tensor | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
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
    received: list[Tensor] = []

    def run(tensors: Sequence[Tensor]) -> Any:
        pair = _submit_alltoall(tensors[0], splits, name, process_set, urgent=True).wait()
        received.append(pair[1])
        return pair

    def gradients_of(gradients: Sequence[Tensor], shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
        """Send the gradients back to the worker that the rows came from; rows that were not sent get zeros."""
        returned, _ = _submit_alltoall(gradients[0], received[0], None, process_set, urgent=True).wait()
        dropped = returned.new_zeros((shapes[0][0] - returned.shape[0], *returned.shape[1:]))
        return [torch.cat([returned, dropped])]

    output, counts = differentiable(run, gradients_of, [tensor])
    return output if splits is None else (output, counts)


def alltoall_async(
    tensor: Tensor, splits: Tensor | None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an `alltoall`, not differentiable; return a handle, whose result is always the pair."""
    return handle_of(_submit_alltoall(tensor, splits, name, process_set))
