"""Small all-reduces inside the control messages: one exchange agrees on the requests and sends their tensors.

Every worker then reduces all workers' tensors itself, in order of rank, so all get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.hvd.engine.control import CAPACITY_BYTES
from lockstep.hvd.engine.reduction import AVERAGE, WIRE_TYPES, Reduction, reduce_rows, scale_
from lockstep.hvd.engine.request import Collective

ALIGNMENT_BYTES = 16


def place_of(requests: Sequence[Collective], head_bytes: int) -> slice | None:
    """Return the slice of a message, after `head_bytes`, for the requests' tensors; None if it cannot carry them."""
    size_bytes = sum([request.size_bytes for request in requests])
    start = -(-head_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if not 0 < size_bytes < CAPACITY_BYTES - start:  # the last byte has another use
        return None
    types = {dtype for request in requests for dtype in request.sent_dtypes}
    reductions = {request.fused_by for request in requests}
    on_cpu = all(tensor.is_cpu for request in requests for tensor in request.tensors)
    if len(reductions) > 1 or len(types) > 1 or not on_cpu:
        return None
    return slice(start, start + size_bytes) if reductions.pop() is not None else None


def pack(requests: Sequence[Collective], message: torch.Tensor) -> None:
    """Write the requests' tensors, prescaled, into their slice of a message, uint8 [bytes]."""
    tensors = [tensor.reshape(-1) for request in requests for tensor in request.tensors]
    elements = message.view(requests[0].sent_dtypes[0])
    elements.copy_(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
    scale_(elements, _reduction(requests).prescale)


def unpack(requests: Sequence[Collective], messages: torch.Tensor) -> list[torch.Tensor | tuple[torch.Tensor, ...]]:
    """Return the requests' results from their slice of all workers' messages, uint8 [workers, bytes] by rank."""
    reduction = _reduction(requests)
    dtype = requests[0].sent_dtypes[0]
    rows = messages.view(dtype)
    reduced = reduce_rows(rows.to(WIRE_TYPES[dtype]) if dtype in WIRE_TYPES else rows, reduction.operation)
    scale_(reduced, reduction.postscale, len(rows) if reduction.operation == AVERAGE else 1)
    tensors = [tensor for request in requests for tensor in request.tensors]
    reduced = reduced.to(dtype)
    parts = iter(reduced.split([tensor.numel() for tensor in tensors]) if len(tensors) > 1 else [reduced])
    results: list[torch.Tensor | tuple[torch.Tensor, ...]] = []
    for request in requests:
        outputs = []
        for tensor in request.tensors:
            part = next(parts).view(tensor.shape)
            # A copy, since autograd forbids in-place changes of these views.
            outputs.append(tensor.copy_(part) if request.in_place else part.to(tensor.dtype, copy=True))
        results.append(tuple(outputs) if request.grouped else outputs[0])
    return results


def _reduction(requests: Sequence[Collective]) -> Reduction:
    reduction = requests[0].fused_by
    assert reduction is not None
    return reduction
