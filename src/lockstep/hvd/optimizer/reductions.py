"""The reductions of a step's buckets: how gradients are sent, waited for and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.hvd.compression import Compression, Compressor, sent_dtype
from lockstep.hvd.engine.fusion import Allreduce
from lockstep.hvd.engine.request import AVERAGE, Collective, Members
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.ops.rows import sparse_allreduce_async
from lockstep.hvd.ops.submission import submit
from lockstep.hvd.optimizer.buckets import Bucket, GradientSlot
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are reduced.

    Attributes:
        groups: Parameters to reduce together, by index; the others are put into buckets.
        passes: The number of backward passes whose gradients are summed before the reduction.
        predivide: f: gradients are multiplied by 1/f before the sum and f/size after it; 1 unless they are averaged.
    """

    compression: type[Compressor] = Compression.none
    groups: Sequence[Sequence[int]] = ()
    passes: int = 1
    operation: int = AVERAGE
    predivide: float = 1.0
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set


class Reductions(dict[Bucket, list[Callable[[], Any]]]):
    """The reductions in progress: for each bucket that was started, functions that wait for its parts.

    The functions are removed as they are called, so that a reduced bucket has none.
    """

    def __init__(self, options: GradientOptions) -> None:
        super().__init__()
        self._options, self.process_set = options, options.process_set
        self._sent_dtype = sent_dtype(options.compression)  # to which the copies to the fusion buffer convert
        compression = options.compression or Compression.none  # scripts pass None, too
        self._compression = compression if self._sent_dtype is None else Compression.none

    def start(self, bucket: Bucket, revocable: bool = True) -> None:
        """Submit the reduction of a bucket's gradients."""
        slots = bucket.slots
        gradients = [no_gradient(slot) if (grad := slot.parameter.grad) is None else grad for slot in slots]
        if any(map(Tensor.is_complex, gradients)) or any(map(Tensor.is_neg, gradients)):
            gradients = [_resolved(slot, gradient) for slot, gradient in zip(slots, gradients, strict=True)]
        sparse: list[tuple[GradientSlot, Tensor]] = []
        has_sparse = any(gradient.is_sparse for gradient in gradients)
        if has_sparse and not self._options.sparse_as_dense:
            pairs = list(zip(slots, gradients, strict=True))
            sparse = [pair for pair in pairs if pair[1].is_sparse]
            slots = [slot for slot, gradient in pairs if not gradient.is_sparse]
            gradients = [gradient for gradient in gradients if not gradient.is_sparse]
            if slots and revocable:
                return  # until `finish`, since the end of the backward pass waits for dense buckets only
        waits: list[Callable[[], Any]] = []
        bucket.request = None
        for slot, gradient in sparse:
            slot.sparse = True
            waits.append(self._start_sparse(slot, gradient))
        if slots:
            converts = has_sparse and self._options.sparse_as_dense
            members = Members.of(bucket.key, [slot.name for slot in slots]) if sparse else bucket.members
            request, wait = self._start_dense(members, slots, gradients, converts, revocable)
            bucket.request = request if revocable else None
            waits.append(wait)
        self[bucket] = waits

    def _start_sparse(self, slot: GradientSlot, gradient: Tensor) -> Callable[[], Any]:
        finish = sparse_allreduce_async(gradient, slot.name, self._options.operation, self._options.process_set)

        def wait() -> None:
            slot.parameter.grad = finish()

        return wait

    def _start_dense(
        self, members: Members, slots: list[GradientSlot], gradients: list[Tensor], converts: bool, revocable: bool
    ) -> tuple[Collective, Callable[[], Any]]:
        compression = self._compression
        if compression is Compression.none and not converts:
            request = self._submit(members, gradients, revocable)
            return request, request.wait
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        pairs = [compression.compress(tensor) for tensor in dense]
        request = self._submit(members, [tensor for tensor, _ in pairs], revocable)

        def wait() -> None:
            results = request.wait()
            if request.given_back:
                return
            for slot, gradient, reduced, (_, context) in zip(slots, gradients, results, pairs, strict=True):
                result = compression.decompress(reduced, context)
                if gradient.is_sparse:
                    slot.parameter.grad = result.to_sparse(gradient.sparse_dim())
                elif result is not gradient:
                    gradient.copy_(result)

        return request, wait

    def _submit(self, members: Members, tensors: Sequence[Tensor], revocable: bool) -> Collective:
        return submit(
            Allreduce,
            tensors,
            members.label,
            self._options.process_set,
            grouped=True,
            in_place=True,
            urgent=True,
            revocable=revocable,
            late=not revocable,
            operation=self._options.operation,
            prescale=1 / self._options.predivide,
            postscale=self._options.predivide,
            sent_dtype=self._sent_dtype,
            members=members,
        )

    def wait(self) -> None:
        """Wait for all started reductions, also after an error, so that none writes to the next step's gradients."""
        first_error = None
        for bucket in list(self):
            try:
                self.wait_for(bucket)
            except HorovodInternalError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def wait_for(self, bucket: Bucket) -> None:
        """Wait for the reductions of a bucket; it counts as not started if the engine has given it back."""
        waits = self[bucket]
        with torch.no_grad():
            while waits:
                waits[-1]()
                waits.pop()
        if bucket.request is not None and bucket.request.given_back:
            del self[bucket]


def _resolved(slot: GradientSlot, gradient: Tensor) -> Tensor:
    """Return a gradient as real numbers, stored neither conjugated nor negated, so that it can be reduced in place."""
    if gradient.is_conj() or gradient.is_neg():
        gradient = slot.parameter.grad = gradient.resolve_conj().resolve_neg()
    return torch.view_as_real(gradient) if gradient.is_complex() and not gradient.is_sparse else gradient


def no_gradient(slot: GradientSlot) -> Tensor:
    """Return zeros for a parameter without a gradient; for sparse gradients, a sparse tensor without entries."""
    parameter = slot.parameter
    if slot.sparse:
        no_indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        no_rows = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(no_indices, no_rows, parameter.shape, check_invariants=False)
    gradient = torch.zeros_like(parameter)
    if parameter.requires_grad:
        parameter.grad = gradient
    return gradient
