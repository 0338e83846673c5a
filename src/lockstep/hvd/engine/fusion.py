"""Fusion: which small all-reduces run as one, and how their tensors share a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.engine.exchange import Exchange
from lockstep.hvd.engine.reduction import AVERAGE, HALF_TYPES, REDUCE_OPS, WIRE_TYPES, Reduction, copy_scaled, scale_
from lockstep.hvd.engine.request import Collective

EARLY_TYPES = (torch.float32, torch.float64)
FUSED_BYTES = 1 << 20  # for larger tensors, the copy into the fusion buffer and back costs more than it saves
FUSED_DEVICE_BYTES = 32 << 20  # on a GPU, copies are cheap and calls of the library expensive


def fused_bytes(tensor: torch.Tensor) -> int:
    """Return the size in bytes up to which tensors on this tensor's device are fused."""
    return FUSED_BYTES if tensor.is_cpu else FUSED_DEVICE_BYTES


def plan_fusion(requests: Sequence[Collective], threshold_bytes: int) -> list[list[Collective]]:
    """Put small fusible requests into batches of at most `threshold_bytes`, in order of their first member.

    A grouped request is always a separate batch, so that its layout does not depend on what else is pending. The plan
    may depend only on what the workers agreed on: if their batches differed, the job would fail.
    """
    batches: list[list[Collective]] = []
    open_batches: dict[Any, tuple[list[Collective], int]] = {}
    for request in requests:
        reduction = request.fused_by
        if reduction is None or request.grouped or request.size_bytes > fused_bytes(request.tensors[0]):
            batches.append([request])
            continue
        key = request.tensors[0].dtype, request.tensors[0].device.type, reduction
        batch, size_bytes = open_batches.get(key, ([], 0))
        if not batch or size_bytes + request.size_bytes > threshold_bytes:
            batch, size_bytes = [], 0
            batches.append(batch)
        batch.append(request)
        open_batches[key] = batch, size_bytes + request.size_bytes
    return batches


def reduce_fused(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], reduction: Reduction, exchange: Exchange) -> None:
    """All-reduce tensors of one dtype into their outputs: small ones in a fusion buffer, large ones directly."""
    divisor = exchange.size if reduction.operation == AVERAGE else 1
    operation = REDUCE_OPS[reduction.operation]
    dtype, limit = pairs[0][0].dtype, fused_bytes(pairs[0][0])
    wire = WIRE_TYPES.get(dtype)
    fuses = [bool(wire) or (pair[0].nbytes <= limit and len(pairs) > 1) for pair in pairs]
    small = [pair for pair, fused in zip(pairs, fuses, strict=True) if fused]
    large = [pair for pair, fused in zip(pairs, fuses, strict=True) if not fused]
    # Division by a power of two is exact, so dividing before the sum saves a pass. Half precision is always divided
    # before the sum, which would overflow with many workers.
    early = divisor if dtype in EARLY_TYPES and divisor & (divisor - 1) == 0 else 1
    if dtype in HALF_TYPES:
        early = 1 << (divisor - 1).bit_length()
    for tensor, output in large:
        copy_scaled(tensor, output, reduction.prescale, early)
    wholes = [output.view(-1) for _, output in large]
    if not small:
        exchange.transfers.all_reduce(wholes, operation)
    else:
        tensors, outputs = (list(side) for side in zip(*small, strict=True))
        buffer = exchange.buffer(tensors, wire or dtype)
        parts = list(buffer.split([tensor.numel() for tensor in tensors]))
        if wire:
            torch._foreach_copy_(parts, [tensor.reshape(-1) for tensor in tensors])
        else:
            torch.cat([tensor.reshape(-1) for tensor in tensors], out=buffer)
        scale_(buffer, reduction.prescale, early)
        exchange.transfers.all_reduce([*wholes, buffer], operation)
        scale_(buffer, reduction.postscale * early, divisor)
        torch._foreach_copy_([output.view(-1) for output in outputs], parts)
    for _, output in large:
        scale_(output, reduction.postscale * early, divisor)
