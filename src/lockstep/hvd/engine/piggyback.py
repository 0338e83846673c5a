"""Small all-reduces that travel inside the control messages: the round that agrees on them also carries them.

Every worker then has all workers' tensors and reduces them itself, in the order of the ranks, so all get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.hvd.engine.control import CAPACITY_BYTES
from lockstep.hvd.engine.reduction import ADASUM, AVERAGE, WIRE_TYPES, reduce_rows, scale_
from lockstep.hvd.engine.request import Request

ALIGNMENT_BYTES = 16


def place_of(requests: Sequence[Request], head_bytes: int) -> slice | None:
    """Where in a message, after `head_bytes`, the requests' tensors go; None where they do not or must not."""
    size_bytes = sum([request.size_bytes for request in requests])
    start = -(-head_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if not 0 < size_bytes <= CAPACITY_BYTES - start:
        return None
    kinds = {(request.kind, request.operation, request.prescale, request.postscale) for request in requests}
    types = {(tensor.dtype, tensor.device.type) for request in requests for tensor in request.tensors}
    if len(kinds) > 1 or len(types) > 1 or types.pop()[1] != "cpu":
        return None
    kind, operation, _, _ = kinds.pop()
    return slice(start, start + size_bytes) if kind == "allreduce" and operation != ADASUM else None


def pack(requests: Sequence[Request], message: torch.Tensor) -> None:
    """Write the requests' tensors into their place in a message, uint8 [bytes]."""
    tensors = [tensor.reshape(-1) for request in requests for tensor in request.tensors]
    elements = message.view(tensors[0].dtype)
    elements.copy_(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
    scale_(elements, requests[0].prescale)


def unpack(requests: Sequence[Request], messages: torch.Tensor) -> list[torch.Tensor | tuple[torch.Tensor, ...]]:
    """The results of the requests, from their place in all workers' messages, uint8 [workers, bytes] by rank."""
    first = requests[0]
    dtype = first.tensors[0].dtype
    rows = messages.view(dtype)
    reduced = reduce_rows(rows.to(WIRE_TYPES[dtype]) if dtype in WIRE_TYPES else rows, first.operation)
    scale_(reduced, first.postscale, len(rows) if first.operation == AVERAGE else 1)
    tensors = [tensor for request in requests for tensor in request.tensors]
    reduced = reduced.to(dtype)
    parts = iter(reduced.split([tensor.numel() for tensor in tensors]) if len(tensors) > 1 else [reduced])
    results: list[torch.Tensor | tuple[torch.Tensor, ...]] = []
    for request in requests:
        outputs = []
        for tensor in request.tensors:
            part = next(parts).view(tensor.shape)
            # A copy, since autograd does not let the caller change a view in place.
            outputs.append(tensor.copy_(part) if request.in_place else part.clone())
        results.append(tuple(outputs) if request.grouped else outputs[0])
    return results
