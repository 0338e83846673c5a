"""Carrying out what the workers have agreed on: fusing small all-reduces, scaling, and the shapes of the results."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.hvd.engine import piggyback
from lockstep.hvd.engine.adasum import adasum_
from lockstep.hvd.engine.agreement import ENTRY_BYTES, HEADER_BYTES
from lockstep.hvd.engine.connections import Links
from lockstep.hvd.engine.control import Control
from lockstep.hvd.engine.reduction import ADASUM, AVERAGE, HALF_TYPES, REDUCE_OPS, SUM, WIRE_TYPES, reduce_rows, scale_
from lockstep.hvd.engine.request import Request
from lockstep.hvd.engine.timeline import Timeline
from lockstep.hvd.engine.transfers import Transfers

EARLY_TYPES = (torch.float32, torch.float64)
FUSED_BYTES = 1 << 20  # a larger tensor gains nothing from being copied into the fusion buffer and back
FUSED_DEVICE_BYTES = 32 << 20  # on a GPU, where the copy is cheap and each call of the library dear


def fused_bytes(tensor: torch.Tensor) -> int:
    """The largest size of a tensor that is fused with others, where this one is."""
    return FUSED_BYTES if tensor.is_cpu else FUSED_DEVICE_BYTES


def plan_batches(requests: Sequence[Request], threshold_bytes: int) -> list[list[Request]]:
    """Join small all-reduces of one kind into batches of at most `threshold_bytes`, in order of their first member.

    A grouped request is a batch of its own, so that its layout does not depend on what else is pending. Only what the
    workers have agreed on may decide here: a batch that differs between them would end the job.
    """
    batches: list[list[Request]] = []
    open_batches: dict[Any, tuple[list[Request], int]] = {}
    for request in requests:
        fuses = request.kind == "allreduce" and not request.grouped and request.operation != ADASUM
        if not fuses or request.size_bytes > fused_bytes(request.tensors[0]):
            batches.append([request])
            continue
        tensor = request.tensors[0]
        key = tensor.dtype, tensor.device.type, request.operation, request.prescale, request.postscale
        batch, size_bytes = open_batches.get(key, ([], 0))
        if not batch or size_bytes + request.size_bytes > threshold_bytes:
            batch, size_bytes = [], 0
            batches.append(batch)
        batch.append(request)
        open_batches[key] = batch, size_bytes + request.size_bytes
    return batches


class Execution:
    """Executes agreed requests of one process set, all workers in the same order.

    Args:
        links: The data collectives by device.
        control: The set's control connection, for the sizes that only the workers together know.
        ranks: The global ranks of the set.
        finish: Called with each request and its result.
    """

    def __init__(
        self,
        links: Links,
        control: Control,
        ranks: Sequence[int],
        threshold_bytes: int,
        timeline: Timeline,
        finish: Callable[[Request, Any], None],
    ) -> None:
        self._links = links
        self._control = control
        self._ranks = ranks
        self._size = control.size
        self._threshold_bytes = threshold_bytes
        self._timeline = timeline
        self._finish = finish
        self._buffers: dict[Any, torch.Tensor] = {}

    def run(self, requests: Sequence[Request]) -> None:
        """Carry out the requests."""
        for batch in plan_batches(requests, self._threshold_bytes):
            device = batch[0].tensors[0].device if batch[0].tensors else torch.device("cpu")
            transfers = self._links.transfers(device)
            with self._timeline.activity(batch), self._links.on_stream(device, batch) as stream:
                results = getattr(self, f"_{batch[0].kind}")(batch, transfers)
            ready = stream.record_event() if stream else None
            for request, result in zip(batch, results, strict=True):
                request.ready = ready
                self._finish(request, result)

    def _barrier(self, batch: list[Request], transfers: Transfers) -> list[Any]:
        return [None]  # that all have agreed is all there is to it

    _agreement = _barrier

    def _allreduce(self, batch: list[Request], transfers: Transfers) -> list[Any]:
        request = batch[0]
        alone = len(batch) == 1 and self._size > 1
        if place := piggyback.place_of(batch, HEADER_BYTES + ENTRY_BYTES) if alone else None:
            # Were nothing else pending, it would have travelled in the round's message: sum in that order here too,
            # so that timing changes no bit.
            piggyback.pack(batch, self._control.outgoing_tensor[place])
            self._control.exchange(place.stop)
            return piggyback.unpack(batch, self._control.rows()[:, place])
        tensors = [tensor for member in batch for tensor in member.tensors]
        in_place = [member.in_place for member in batch for _ in member.tensors]
        outputs = [
            tensor
            if inside and tensor.is_contiguous()
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor, inside in zip(tensors, in_place, strict=True)
        ]
        if request.operation == ADASUM:
            for tensor, output in zip(tensors, outputs, strict=True):
                _copy(tensor, output, request.prescale)
                adasum_(output, transfers)
                scale_(output, request.postscale)
        else:
            for dtype in dict.fromkeys([tensor.dtype for tensor in tensors]):
                pairs = [pair for pair in zip(tensors, outputs, strict=True) if pair[0].dtype == dtype]
                self._reduce(pairs, request, transfers)
        results = [
            tensor.copy_(output) if inside and output is not tensor else output
            for tensor, output, inside in zip(tensors, outputs, in_place, strict=True)
        ]
        return [tuple(results)] if request.grouped else results

    def _reduce(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], request: Request, transfers: Transfers) -> None:
        """All-reduce tensors of one dtype, each into its output: small ones fused, large ones where they are."""
        divisor = self._size if request.operation == AVERAGE else 1
        operation = REDUCE_OPS[request.operation]
        dtype, limit = pairs[0][0].dtype, fused_bytes(pairs[0][0])
        wire = WIRE_TYPES.get(dtype)
        fuses = [bool(wire) or (pair[0].nbytes <= limit and len(pairs) > 1) for pair in pairs]
        small = [pair for pair, fused in zip(pairs, fuses, strict=True) if fused]
        large = [pair for pair, fused in zip(pairs, fuses, strict=True) if not fused]
        # Where a power of two divides the bits come out the same before the sum, which takes one pass less. The range
        # of half precision has no room for the sum of many.
        early = divisor if dtype in EARLY_TYPES and divisor & (divisor - 1) == 0 else 1
        if dtype in HALF_TYPES:
            early = 1 << (divisor - 1).bit_length()
        for tensor, output in large:
            _copy(tensor, output, request.prescale, early)
        wholes = [output.view(-1) for _, output in large]
        if not small:
            transfers.all_reduce(wholes, operation)
        else:
            tensors, outputs = (list(side) for side in zip(*small, strict=True))
            buffer = self._buffer(tensors, wire or tensors[0].dtype)
            parts = list(buffer.split([tensor.numel() for tensor in tensors]))
            if wire:
                torch._foreach_copy_(parts, [tensor.reshape(-1) for tensor in tensors])
            else:
                torch.cat([tensor.reshape(-1) for tensor in tensors], out=buffer)
            scale_(buffer, request.prescale, early)
            transfers.all_reduce([*wholes, buffer], operation)
            scale_(buffer, request.postscale * early, divisor)
            torch._foreach_copy_([output.view(-1) for output in outputs], parts)
        for _, output in large:
            scale_(output, request.postscale * early, divisor)

    def _buffer(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """A fusion buffer for the elements of all tensors; kept, since fresh memory costs more than the copy."""
        count = sum(tensor.numel() for tensor in tensors)
        key = dtype, tensors[0].device
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[key] = torch.empty(count, dtype=dtype, device=tensors[0].device)
        return buffer[:count]

    def _broadcast(self, batch: list[Request], transfers: Transfers) -> list[Any]:
        (request,) = batch
        root = self._ranks.index(request.root)
        tensor = request.tensors[0]
        in_place = request.in_place and tensor.is_contiguous()
        output = tensor if in_place else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if transfers.rank == root and not in_place:
            output.copy_(tensor)
        transfers.broadcast(output, root)
        return [tensor.copy_(output) if request.in_place and not in_place else output]

    def _allgather(self, batch: list[Request], transfers: Transfers) -> list[Any]:
        (request,) = batch
        rows = self._exchange_numbers([tensor.shape[0] for tensor in request.tensors])
        outputs = []
        for index, tensor in enumerate(map(torch.Tensor.contiguous, request.tensors)):
            counts = [numbers[index] for numbers in rows]
            output = tensor.new_empty((sum(counts), *tensor.shape[1:]))
            if len(set(counts)) == 1:
                transfers.all_gather(output, tensor)
            else:
                transfers.all_to_all(output.split(counts), [tensor] * self._size)
            outputs.append(output)
        return [tuple(outputs) if request.grouped else outputs[0]]

    def _alltoall(self, batch: list[Request], transfers: Transfers) -> list[Any]:
        (request,) = batch
        tensor, splits = request.tensors[0].contiguous(), request.splits or []
        received = [numbers[self._control.rank] for numbers in self._exchange_numbers(splits)]
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        transfers.all_to_all(output.split(received), tensor[: sum(splits)].split(splits))
        return [(output, torch.tensor(received, dtype=torch.int32, device="cpu"))]

    def _reducescatter(self, batch: list[Request], transfers: Transfers) -> list[Any]:
        (request,) = batch
        outputs = []
        for tensor in request.tensors:
            wire = tensor.to(WIRE_TYPES.get(tensor.dtype, tensor.dtype))
            scaled = wire.clone(memory_format=torch.contiguous_format) if request.prescale != 1 else wire.contiguous()
            scale_(scaled, request.prescale)
            counts = rows_of_each(tensor.shape[0], self._size)
            pieces = wire.new_empty((self._size, counts[transfers.rank], *tensor.shape[1:]))
            transfers.all_to_all(list(pieces), scaled.split(counts))
            output = reduce_rows(pieces, SUM)
            scale_(output, request.postscale, self._size if request.operation == AVERAGE else 1)
            outputs.append(output.to(tensor.dtype))
        return [tuple(outputs) if request.grouped else outputs[0]]

    def _exchange_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Whole numbers of all workers, by rank."""
        messages = self._control.exchange_bytes(struct.pack(f"<{len(numbers)}q", *numbers))
        return [list(struct.unpack(f"<{len(message) // 8}q", message)) for message in messages]


def rows_of_each(rows: int, size: int) -> list[int]:
    """How many of `rows` each of `size` workers gets: the first ones get one more where they do not divide."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _copy(tensor: torch.Tensor, output: torch.Tensor, factor: float, divisor: int = 1) -> None:
    """Make `output`, which may be the tensor itself, the tensor times factor / divisor."""
    if output is tensor:
        scale_(output, factor, divisor)
    elif tensor.is_floating_point() and factor / divisor != 1:
        torch.mul(tensor, factor / divisor, out=output)
    else:
        output.copy_(tensor)
        scale_(output, factor, divisor)
