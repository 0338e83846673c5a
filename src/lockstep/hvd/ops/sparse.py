"""All-reduce of sparse tensors: gathers the entries of all workers, so that the result stays sparse."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.hvd.engine.reduction import AVERAGE, OPERATION_NAMES, SUM, scale_
from lockstep.hvd.ops.allgather import allgather_async
from lockstep.hvd.ops.submission import synchronize
from lockstep.hvd.process_sets import ProcessSet, global_process_set


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
