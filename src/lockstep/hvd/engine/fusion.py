"""All-reduces. Small ones run as one, in a shared buffer.

The smallest ones travel inside the control messages: one exchange agrees on the requests and sends their tensors.
Every worker then reduces all workers' tensors itself, in order of rank, so all get the same bits.

Adasum adds orthogonal gradients and averages parallel ones (S. Maleki et al., "Scaling Distributed Training with
Adaptive Summation", arXiv 2006.02924, sections 3 and 4). Pairs of workers combine a and b to
(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, then pairs of pairs, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from lockstep.hvd.engine.agreement import ENTRY_BYTES, HEADER_BYTES
from lockstep.hvd.engine.request import (
    ADASUM,
    AVERAGE,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Collective,
    ReducingCollective,
    Reduction,
)
from lockstep.hvd.engine.transfers import BUFFER_BYTES, CAPACITY_BYTES, SetConnections, Transfers
from lockstep.world import accelerator

REDUCE_OPS = {AVERAGE: ReduceOp.SUM, SUM: ReduceOp.SUM, MIN: ReduceOp.MIN, MAX: ReduceOp.MAX, PRODUCT: ReduceOp.PRODUCT}
# bool is reduced as int32: Sum and Max are "any", Product, Min and Average are "all".
WIRE_TYPES = {torch.bool: torch.int32}
HALF_TYPES = (torch.float16, torch.bfloat16)
EARLY_TYPES = (torch.float32, torch.float64)
FUSED_BYTES = 1 << 20  # for larger tensors, the copy into the fusion buffer and back costs more than it saves
FUSED_DEVICE_BYTES = BUFFER_BYTES  # on a GPU, copies are cheap and calls of the library expensive

Pair = tuple[torch.Tensor, torch.Tensor]  # a tensor, and the output for its reduction; the output may be the tensor


class Allreduce(ReducingCollective, kind="allreduce"):
    """Reduces tensors. The only kind that is fused; a worker that has joined takes part with zeros.

    Args:
        sent_dtype: Not supported with ADASUM.
    """

    joinable = True

    @property
    def fused_by(self) -> Reduction | None:
        return None if self.reduction.operation == ADASUM else self.reduction

    @classmethod
    def execute_all(cls, batch: Sequence[Allreduce], links: SetConnections) -> list[Any]:
        alone = len(batch) == 1 and links.size > 1
        if place := message_slice(batch, HEADER_BYTES + ENTRY_BYTES) if alone else None:
            # With nothing else pending, this request would have been sent in the round's message. Sum in the same
            # order here, so that the result does not depend on timing.
            pack_message(batch, links.control.outgoing_tensor[place])
            links.control.exchange(place.stop)
            return unpack_message(batch, links.control.rows()[:, place])
        reduction = batch[0].reduction
        tensors = [tensor for member in batch for tensor in member.tensors]
        in_place = [member.in_place for member in batch for _ in member.tensors]
        outputs = [
            tensor if inside else torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor, inside in zip(tensors, in_place, strict=True)
        ]
        pairs = list(zip(tensors, outputs, strict=True))
        if reduction.operation == ADASUM:
            for tensor, output in pairs:
                whole = output.contiguous()
                copy_scaled(tensor, whole, reduction.prescale)
                adasum_(whole, links.transfers)
                scale_(whole, reduction.postscale)
                if whole is not output:
                    output.copy_(whole)
        else:
            sent_dtypes = [dtype for member in batch for dtype in member.sent_dtypes]
            for dtype in dict.fromkeys(sent_dtypes):
                alike = [pair for pair, sent in zip(pairs, sent_dtypes, strict=True) if sent == dtype]
                reduce_fused(alike, dtype, reduction, links)
        return [tuple(outputs)] if batch[0].grouped else outputs


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
        key = request.sent_dtypes[0], request.tensors[0].device.type, reduction
        batch, size_bytes = open_batches.get(key, ([], 0))
        if not batch or size_bytes + request.size_bytes > threshold_bytes:
            batch, size_bytes = [], 0
            batches.append(batch)
        batch.append(request)
        open_batches[key] = batch, size_bytes + request.size_bytes
    return batches


def reduce_fused(pairs: Sequence[Pair], dtype: torch.dtype, reduction: Reduction, links: SetConnections) -> None:
    """All-reduce tensors into their outputs: small ones in a fusion buffer, large ones directly.

    Tensors that are not sent in their own dtype are converted while they are copied to the buffer and back.

    Args:
        dtype: The dtype that all of them are sent in.
    """
    dtype = WIRE_TYPES.get(dtype, dtype)
    limit = fused_bytes(pairs[0][0])
    small: list[Pair] = []
    large: list[Pair] = []
    for pair in pairs:
        fits = len(pairs) > 1 and pair[0].numel() * dtype.itemsize <= limit
        (small if fits else large).append(pair)
    scales = _scales(dtype, reduction, links.size)
    # This order must not depend on which tensors are converted: on a worker that has joined, none are.
    for load, fused in _loads([*small, *large], len(small), dtype):
        _reduce_load(load, fused, dtype, scales, links)


def _reduce_load(load: Sequence[Pair], fused: int, dtype: torch.dtype, scales: Scales, links: SetConnections) -> None:
    """All-reduce the first `fused` tensors as one, and each of the others by itself."""
    packed = [*load[:fused], *(pair for pair in load[fused:] if pair[0].dtype != dtype)]  # sent from the buffer
    counts = [tensor.numel() for tensor, _ in packed]
    calls: list[torch.Tensor] = []
    parts: Sequence[torch.Tensor] = ()
    if packed:
        buffer = links.buffer(sum(counts), dtype, packed[0][0].device)
        parts = buffer.split(counts)
        _pack(packed, buffer, parts)
        scale_(buffer, *scales.before)
        calls.append(buffer[: sum(counts[:fused])])
    converted = iter(parts[fused:])
    direct: list[Pair] = []
    for tensor, output in load[fused:]:
        if tensor.dtype != dtype:
            calls.append(next(converted))
            continue
        whole = output if output.is_contiguous() else torch.empty(output.shape, dtype=dtype, device=output.device)
        copy_scaled(tensor, whole, *scales.before)
        direct.append((whole, output))
        calls.append(whole.view(-1))
    links.transfers.all_reduce(calls, scales.operation)
    if packed:
        scale_(buffer, *scales.after)
        _copy_all(parts, [output for _, output in packed], into_parts=False)
    for whole, output in direct:
        scale_(whole, *scales.after)
        if whole is not output:
            output.copy_(whole)


class Scales(NamedTuple):
    """The library's operation, and the factors and divisors before and after it."""

    operation: ReduceOp.RedOpType
    before: tuple[float, int]
    after: tuple[float, int]


def _scales(dtype: torch.dtype, reduction: Reduction, size: int) -> Scales:
    divisor = size if reduction.operation == AVERAGE else 1
    # Division by a power of two is exact, so dividing before the sum saves a pass. Half precision is always divided
    # before the sum, which would overflow with many workers.
    early = divisor if dtype in EARLY_TYPES and divisor & (divisor - 1) == 0 else 1
    if dtype in HALF_TYPES:
        early = 1 << (divisor - 1).bit_length()
    return Scales(REDUCE_OPS[reduction.operation], (reduction.prescale, early), (reduction.postscale * early, divisor))


def _loads(pairs: Sequence[Pair], fused: int, dtype: torch.dtype) -> list[tuple[list[Pair], int]]:
    """Divide pairs into loads of at most BUFFER_BYTES of buffer; return each with the number of its fused pairs.

    Args:
        fused: How many pairs, from the first on, may be reduced as one; each of the others has its own call.
    """
    loads: list[tuple[list[Pair], int]] = []
    free_bytes = 0
    for index, pair in enumerate(pairs):
        size_bytes = pair[0].numel() * dtype.itemsize if index < fused or pair[0].dtype != dtype else 0
        if not loads or size_bytes > free_bytes:
            loads.append(([], 0))
            free_bytes = BUFFER_BYTES
        load, count = loads[-1]
        load.append(pair)
        loads[-1] = load, count + (index < fused)
        free_bytes -= size_bytes
    return loads


def _pack(load: Sequence[Pair], buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    tensors = [tensor for tensor, _ in load]
    if all(tensor.dtype == buffer.dtype and tensor.is_contiguous() for tensor in tensors):
        torch.cat([tensor.view(-1) for tensor in tensors], out=buffer)  # on a CPU, faster than single copies
    else:
        _copy_all(parts, tensors, into_parts=True)


def _copy_all(parts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], into_parts: bool) -> None:
    """Copy tensors into the parts of a buffer, which are vectors, or the parts into the tensors, converting the dtype.

    On an accelerator, contiguous tensors share a launch. Others, such as channels_last gradients, have one each, which
    needs no contiguous copy.
    """
    flat_parts, flat_tensors = [], []
    for part, tensor in zip(parts, tensors, strict=True):
        if tensor.is_contiguous():
            flat_parts.append(part)
            flat_tensors.append(tensor.view(-1))
        elif into_parts:
            part.view(tensor.shape).copy_(tensor)
        else:
            tensor.copy_(part.view(tensor.shape))
    if flat_parts:
        targets, sources = (flat_parts, flat_tensors) if into_parts else (flat_tensors, flat_parts)
        torch._foreach_copy_(targets, sources)


ALIGNMENT_BYTES = 16


def message_slice(requests: Sequence[Collective], head_bytes: int) -> slice | None:
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


def pack_message(requests: Sequence[Collective], message: torch.Tensor) -> None:
    """Write the requests' tensors, prescaled, into their slice of a message, uint8 [bytes]."""
    tensors = [tensor.reshape(-1) for request in requests for tensor in request.tensors]
    elements = message.view(requests[0].sent_dtypes[0])
    elements.copy_(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
    scale_(elements, _reduction(requests).prescale)


def unpack_message(
    requests: Sequence[Collective], messages: torch.Tensor
) -> list[torch.Tensor | tuple[torch.Tensor, ...]]:
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


def follow(stream: Any, batch: Sequence[Collective]) -> None:
    """Order the set's stream after the work that produced the requests' tensors."""
    for request in batch:
        if request.written is not None:
            stream.wait_event(request.written)
        if not request.in_place:  # an in-place request keeps its tensors alive itself
            for tensor in request.tensors:
                tensor.record_stream(stream)


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the adaptive sum of two gradients of one shape, in their dtype.

    Dot products are in float64, if the device has it.
    """
    kind = accelerator.sum_dtype(a.device)
    one, other = a.to(kind).reshape(-1), b.to(kind).reshape(-1)
    product, one_square, other_square = one.dot(other), one.dot(one), other.dot(other)
    one_share = torch.where(one_square > 0, 1 - product / (2 * one_square), 1.0)
    other_share = torch.where(other_square > 0, 1 - product / (2 * other_square), 1.0)
    return (one_share * one + other_share * other).to(a.dtype).view_as(a)


def adasum_(tensor: torch.Tensor, transfers: Transfers) -> None:
    """Combine a tensor over all workers in place; all get the same bits. Their number must be a power of two."""
    distance = 1
    while distance < transfers.size:
        partner = transfers.rank ^ distance
        theirs = torch.empty_like(tensor)
        nothing = tensor.new_empty(0)
        outputs = [theirs if rank == partner else nothing for rank in range(transfers.size)]
        inputs = [tensor if rank == partner else nothing for rank in range(transfers.size)]
        transfers.all_to_all(outputs, inputs)
        lower_first = (tensor, theirs) if transfers.rank < partner else (theirs, tensor)
        tensor.copy_(combine(*lower_first))
        distance *= 2


def scale_(tensor: torch.Tensor, factor: float, divisor: int = 1) -> None:
    """Multiply by factor / divisor in place; integers are truncated toward zero."""
    if factor == divisor:
        return
    if tensor.is_floating_point():
        if factor == 1:
            tensor.div_(divisor)
        else:
            tensor.mul_(factor / divisor)
    elif factor == 1:
        tensor.div_(divisor, rounding_mode="trunc")
    else:
        has_float64 = accelerator.sum_dtype(tensor.device) == torch.float64
        exact = (tensor if has_float64 else tensor.cpu()).to(torch.float64)
        tensor.copy_(exact.mul_(factor / divisor).trunc_())


def reduce_rows(rows: torch.Tensor, operation: int) -> torch.Tensor:
    """Reduce [workers, ...] over the workers, in order of rank. An average is only summed, not divided.

    The result has the rows' dtype, except that half-precision sums are float32, so that they do not overflow before
    the division.
    """
    if operation in (AVERAGE, SUM):
        return rows.sum(0, dtype=torch.float32 if rows.dtype in HALF_TYPES else rows.dtype)
    if operation == PRODUCT:
        return rows.prod(0, dtype=rows.dtype)
    return rows.amin(0) if operation == MIN else rows.amax(0)


def copy_scaled(tensor: torch.Tensor, output: torch.Tensor, factor: float, divisor: int = 1) -> None:
    """Write `tensor` times factor / divisor to `output`, which may be `tensor` itself."""
    if output is tensor:
        scale_(output, factor, divisor)
    elif tensor.is_floating_point() and factor / divisor != 1:
        torch.mul(tensor, factor / divisor, out=output)
    else:
        output.copy_(tensor)
        scale_(output, factor, divisor)
