"""Reduces gradients while the backward pass is still computing other gradients.

Buckets depend only on the order of the parameters, so that the same tensors are always reduced together, in whatever
order their gradients are computed. A bucket is one grouped in-place all-reduce; its last gradient starts it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lockstep.hvd.compression import Compression, Compressor, sent_dtype
from lockstep.hvd.engine import current
from lockstep.hvd.engine.reduction import AVERAGE
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.monitoring.step_times import BACKWARD, OPTIMIZER, REDUCTION, StepTimes
from lockstep.hvd.ops.allreduce import Allreduce
from lockstep.hvd.ops.sparse import sparse_allreduce_async
from lockstep.hvd.ops.submission import submit
from lockstep.hvd.process_sets import ProcessSet, global_process_set
from lockstep.world.device_clock import DeviceClock

Tensor = torch.Tensor
BUCKET_BYTES = 25 << 20

TOO_MANY_BACKWARDS = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


@dataclass(eq=False)
class Slot:
    """A parameter, and the number of backward passes until its gradient can be reduced."""

    name: str
    parameter: Tensor
    bucket: Bucket
    passes_left: int
    sparse: bool = False  # whether its last gradient was sparse


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are reduced by one operation."""

    slots: list[Slot] = field(default_factory=list)
    missing: int = 0

    @property
    def name(self) -> str:
        first, last = self.slots[0].name, self.slots[-1].name
        return first if len(self.slots) == 1 else f"{first} to {last} ({len(self.slots)} tensors)"


def plan_buckets(sizes_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Put parameters, by index, into buckets of at most `limit_bytes`, from last to first, as backward computes them.

    A parameter larger than the limit gets a separate bucket.
    """
    buckets: list[list[int]] = []
    total = 0
    for index in reversed(range(len(sizes_bytes))):
        if not buckets or total + sizes_bytes[index] > limit_bytes:
            buckets.append([])
            total = 0
        buckets[-1].append(index)
        total += sizes_bytes[index]
    return buckets


_reducers: weakref.WeakSet[Gradients] = weakref.WeakSet()


class Gradients:
    """Reduces the gradients of named parameters over a process set.

    Args:
        named_parameters: All parameters of the optimizer, in the same order on all workers.
        groups: Parameters to reduce together, by index; the others are put into buckets.
        passes: The number of backward passes whose gradients are summed before the reduction.
        predivide: f: gradients are multiplied by 1/f before the sum and f/size after it.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        compression: type[Compressor] = Compression.none,
        groups: Sequence[Sequence[int]] = (),
        passes: int = 1,
        operation: int = AVERAGE,
        predivide: float = 1.0,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        context = current.get()
        self._context = current.context
        # None if the compression does nothing, or if the copies to and from the fusion buffer do the same.
        self._sent_dtype = sent_dtype(compression)
        plain = compression is Compression.none or self._sent_dtype is not None
        self._compression = None if plain else compression
        self._passes = passes
        self._operation = operation
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._slots: dict[Tensor, Slot] = {}
        self._buckets: list[Bucket] = []
        self._started: dict[Bucket, list[Callable[[], Any]]] = {}  # functions that wait for the reductions in progress
        self._has_arrivals = False
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        self._replace_former([parameter for _, parameter in named_parameters])
        # Numbered per process set, because workers outside the set create no such optimizer, and from each hvd.init()
        # on, because a new worker of an elastic job must get the same numbers.
        self._ordinal = context.count_optimizer(process_set.process_set_id or 0)
        _reducers.add(self)
        grouped = {index for group in groups for index in group}
        rest = [index for index in range(len(named_parameters)) if index not in grouped]
        limit = min(BUCKET_BYTES, context.settings.fusion_threshold_bytes)
        plan = plan_buckets([named_parameters[index][1].nbytes for index in rest], limit)
        for indices in [*groups, *([rest[index] for index in bucket] for bucket in plan)]:
            self._add_bucket([named_parameters[index] for index in indices])
        self._in_backward = False  # whether the last backward pass of a step has computed a gradient
        self.step_times = self._find_step_times()

    def _find_step_times(self) -> StepTimes:
        """Return the context's step times; unused ones if steps are not compared, or in another process set."""
        context = current.context
        if context is None or not context.measures_steps or not self._slots:
            return StepTimes()
        if self._process_set is not global_process_set:
            return StepTimes()
        if context.step_times.clock is None:
            context.step_times.clock = DeviceClock(next(iter(self._slots)).device)
        return context.step_times

    def _replace_former(self, parameters: Sequence[Tensor]) -> None:
        """Stop the reducers of earlier optimizers that have some of these parameters."""
        own = set(parameters)
        for reducer in list(_reducers):
            if own & reducer._slots.keys():
                _remove(reducer._hooks)
                _reducers.discard(reducer)

    def _add_bucket(self, named_parameters: Sequence[tuple[str, Tensor]]) -> None:
        prefix = f"optimizer{self._ordinal}." if self._ordinal else ""
        bucket = Bucket(missing=len(named_parameters))
        for name, parameter in named_parameters:
            slot = Slot(prefix + name, parameter, bucket, self._passes)
            bucket.slots.append(slot)
            self._slots[parameter] = slot
            if parameter.requires_grad:
                # Weak references, since the garbage collector cannot see what hooks reference.
                hook = partial(_arrived, weakref.ref(self), weakref.ref(slot))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self._buckets.append(bucket)

    def add_missing(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Add the parameters that require gradients and have not been added yet."""
        for name, parameter in named_parameters:
            if parameter.requires_grad and parameter not in self._slots:
                self._add_bucket([(name, parameter)])

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return len(self._slots)

    @property
    def in_flight(self) -> bool:
        """Whether any gradient has been computed since the last `finish` or `reset`."""
        self._follow_context()
        return self._has_arrivals

    def in_flight_by_parameter(self) -> dict[Tensor, tuple[Callable[[], Any] | None, None]]:
        """Return, for parameters with a new gradient, a function that waits for its reduction (None before its start).

        The second element of each pair is always None, in place of Horovod's compression context.
        """
        self._follow_context()
        return {
            slot.parameter: (partial(self._reduced, slot) if slot.bucket in self._started else None, None)
            for slot in self._slots.values()
            if slot.passes_left < self._passes
        }

    def _reduced(self, slot: Slot) -> Tensor | None:
        with torch.no_grad():
            waits = self._started.get(slot.bucket, [])
            while waits:
                waits.pop()()
        return slot.parameter.grad

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are summed before the reduction."""
        self._passes = passes
        for slot in self._slots.values():
            slot.passes_left = passes

    def reset(self) -> None:
        """Discard the reductions in progress and start a new step."""
        self._started.clear()
        self._has_arrivals = self._in_backward = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.passes_left = self._passes

    def finish(self) -> None:
        """Wait until all gradients are reduced; first start the remaining buckets, with zeros for missing gradients.

        Raises:
            HorovodInternalError: The requests do not match, or a worker disconnected.
        """
        self._follow_context()
        self.step_times.enter(REDUCTION)
        try:
            for bucket in self._buckets:
                if bucket not in self._started:
                    self._start(bucket)
        finally:
            try:
                self._wait()
            finally:
                self.reset()
        self.step_times.enter(OPTIMIZER)

    def _wait(self) -> None:
        """Wait for all started reductions, also after an error, so that none writes to the next step's gradients."""
        first_error = None
        with torch.no_grad():
            for wait in itertools.chain.from_iterable(self._started.values()):
                try:
                    wait()
                except HorovodInternalError as error:
                    first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _follow_context(self) -> None:
        """After hvd.shutdown() and hvd.init(), discard the earlier reductions."""
        if self._context is not current.context:
            self._context = current.context
            self.step_times = self._find_step_times()
            self.reset()

    def arrived(self, slot: Slot) -> None:
        """Count a backward pass for a parameter; the last one of a bucket starts its reduction."""
        if self._context is not current.context:
            self._follow_context()
        self._has_arrivals = True
        slot.passes_left -= 1
        if slot.passes_left > 0:
            return
        if slot.passes_left < 0:
            raise AssertionError(TOO_MANY_BACKWARDS)
        if not self._in_backward:
            self._in_backward = True
            self.step_times.enter(BACKWARD)
        slot.bucket.missing -= 1
        if slot.bucket.missing == 0:
            self._start(slot.bucket)

    def _start(self, bucket: Bucket) -> None:
        """Submit the reduction of a bucket's gradients."""
        waits = self._started[bucket] = []
        slots: list[Slot] = []
        gradients: list[Tensor] = []
        for slot in bucket.slots:
            gradient = slot.parameter.grad
            if gradient is None:
                gradient = _no_gradient(slot)
            if gradient.is_sparse and not self._sparse_as_dense:
                slot.sparse = True
                waits.append(self._start_sparse(slot, gradient))
            else:
                slots.append(slot)
                gradients.append(gradient)
        if slots:
            waits.append(self._start_dense(bucket.name, slots, gradients))

    def _start_sparse(self, slot: Slot, gradient: Tensor) -> Callable[[], Any]:
        finish = sparse_allreduce_async(gradient, slot.name, self._operation, self._process_set)

        def wait() -> None:
            slot.parameter.grad = finish()

        return wait

    def _start_dense(self, name: str, slots: Sequence[Slot], gradients: Sequence[Tensor]) -> Callable[[], Any]:
        compression = self._compression
        if compression is None and not any(gradient.is_sparse for gradient in gradients):
            return self._submit(name, gradients).wait
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        pairs = [compression.compress(tensor) if compression else (tensor, None) for tensor in dense]
        request = self._submit(name, [tensor for tensor, _ in pairs])

        def wait() -> None:
            for slot, gradient, reduced, (_, context) in zip(slots, gradients, request.wait(), pairs, strict=True):
                result = compression.decompress(reduced, context) if compression else reduced
                if gradient.is_sparse:
                    slot.parameter.grad = result.to_sparse(gradient.sparse_dim())
                elif result is not gradient:
                    gradient.copy_(result)

        return wait

    def _submit(self, name: str, tensors: Sequence[Tensor]) -> Collective:
        average = self._operation == AVERAGE
        return submit(
            Allreduce,
            tensors,
            name,
            self._process_set,
            grouped=True,
            in_place=True,
            urgent=True,
            operation=self._operation,
            prescale=1 / self._predivide if average else 1.0,
            postscale=self._predivide if average else 1.0,
            sent_dtype=self._sent_dtype,
        )


def _arrived(gradients: weakref.ref[Gradients], slot: weakref.ref[Slot], _: Tensor) -> None:
    """Autograd hook, called after a parameter's gradient has been accumulated."""
    reducer, known = gradients(), slot()
    if reducer is not None and known is not None:
        reducer.arrived(known)


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _no_gradient(slot: Slot) -> Tensor:
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
