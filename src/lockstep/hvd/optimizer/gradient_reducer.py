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
from lockstep.hvd.engine.lane import HAS_PLAN
from lockstep.hvd.engine.reduction import AVERAGE, SUM
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.monitoring.step_times import BACKWARD, OPTIMIZER, REDUCTION, StepTimes
from lockstep.hvd.ops.allreduce import Allreduce
from lockstep.hvd.ops.sparse import sparse_allreduce_async
from lockstep.hvd.ops.submission import prepare
from lockstep.hvd.optimizer.step_plans import StepPlans
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
    part: int | None = None  # its index in the steps' plan

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
        wire_dtype = sent_dtype(compression)
        plain = compression is Compression.none or wire_dtype is not None
        self._compression = None if plain else compression
        average = operation == AVERAGE
        self._options: dict[str, Any] = {
            "grouped": True,
            "in_place": True,
            "urgent": True,
            "operation": operation,
            "prescale": 1 / predivide if average else 1.0,
            "postscale": predivide if average else 1.0,
            "sent_dtype": wire_dtype,
        }
        self._passes = passes
        self._operation = operation
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
        self._plans = StepPlans(f"optimizer{self._ordinal}", process_set, self._like)
        _reducers.add(self)
        grouped = {index for group in groups for index in group}
        rest = [index for index in range(len(named_parameters)) if index not in grouped]
        limit = min(BUCKET_BYTES, context.settings.fusion_threshold_bytes)
        plan = plan_buckets([named_parameters[index][1].nbytes for index in rest], limit)
        for indices in [*groups, *([rest[index] for index in bucket] for bucket in plan)]:
            self._add_bucket([named_parameters[index] for index in indices])
        # Two numbers that a bucket sends for the plan, if they can be read from a sum or average on a CPU. Steps that
        # are not planned send them too, so that gradients have the same place in the buffer: it affects the last bits.
        self._mark: Tensor | None = None
        if self._buckets and plain and operation in (AVERAGE, SUM) and predivide == 1.0:
            self._has_plan = torch.tensor(HAS_PLAN, dtype=self._buckets[0].slots[0].parameter.dtype, device="cpu")
            self._mark = self._has_plan.clone()
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
        started = set(self._started)
        if self._plans.has_begun:  # buckets are reduced in their order
            started = set(itertools.takewhile(started.__contains__, self._buckets))
        return {
            slot.parameter: (partial(self._reduced, slot) if slot.bucket in started else None, None)
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
        self._plans.drop()
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
            if self._can_plan:
                self._plans.begin()
            for bucket in self._buckets:
                if bucket not in self._started:
                    self._start(bucket)
        finally:
            try:
                self._wait()
            finally:
                self.reset()
        self._plans.end()
        if self._can_plan and self._plans.wants_lane:
            self._request_lane()
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
            if self._can_plan:
                self._plans.begin()
        slot.bucket.missing -= 1
        if slot.bucket.missing == 0:
            self._start(slot.bucket)

    def _start(self, bucket: Bucket) -> None:
        """Submit the reduction of a bucket's gradients."""
        waits = self._started[bucket] = []
        slots: list[Slot] = []
        gradients: list[Tensor] = []
        is_planned = bucket.part is not None and self._plans.has_begun
        for slot in bucket.slots:
            gradient = slot.parameter.grad
            if gradient is None:
                gradient = _no_gradient(slot)
            is_sparse = gradient.is_sparse and not self._sparse_as_dense
            if is_planned and not slot.sparse:  # the plan cannot change, so this one is reduced as a dense one
                is_sparse = False
            if is_sparse:
                slot.sparse = True
                waits.append(self._start_sparse(slot, gradient))
            elif is_planned and slot.sparse:
                waits.append(self._start_dense(slot.name, [slot], [gradient]))
            else:
                slots.append(slot)
                gradients.append(gradient)
        if slots:
            waits.append(self._start_dense(bucket.name, slots, gradients, bucket))

    def _start_sparse(self, slot: Slot, gradient: Tensor) -> Callable[[], Any]:
        finish = sparse_allreduce_async(gradient, slot.name, self._operation, self._process_set)

        def wait() -> None:
            slot.parameter.grad = finish()

        return wait

    def _start_dense(
        self, name: str, slots: Sequence[Slot], gradients: Sequence[Tensor], bucket: Bucket | None = None
    ) -> Callable[[], Any]:
        compression = self._compression
        if compression is None and not any(gradient.is_sparse for gradient in gradients):
            return self._submit(name, gradients, bucket).wait
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        pairs = [compression.compress(tensor) if compression else (tensor, None) for tensor in dense]
        request = self._submit(name, [tensor for tensor, _ in pairs], bucket)

        def wait() -> None:
            results = request.wait()[: len(slots)]
            for slot, gradient, reduced, (_, context) in zip(slots, gradients, results, pairs, strict=True):
                result = compression.decompress(reduced, context) if compression else reduced
                if gradient.is_sparse:
                    slot.parameter.grad = result.to_sparse(gradient.sparse_dim())
                elif result is not gradient:
                    gradient.copy_(result)

        return wait

    def _submit(self, name: str, tensors: Sequence[Tensor], bucket: Bucket | None) -> Collective:
        """Submit an all-reduce: that of a bucket as part of the plan, if the step has one."""
        if bucket is not None and self._mark is not None and self._is_first(bucket) and tensors[0].is_cpu:
            self._mark.copy_(self._has_plan)
            tensors = [*tensors, self._mark]
        channel, request = prepare(Allreduce, tensors, name, self._process_set, **self._options)
        if bucket is None or bucket.part is None or not self._plans.has_begun:
            channel.submit(request)
        else:
            self._plans.add(bucket.part, request)
        return request

    def _is_first(self, bucket: Bucket) -> bool:
        """Return whether a bucket is the first one of the step's plan, or of all if the step has none."""
        return bucket.part == 0 if self._plans.has_begun else bucket is self._buckets[0]

    def _like(self, name: str, parameters: Sequence[Tensor]) -> Collective:
        """Return a request like the one for the gradients of these parameters."""
        return Allreduce(name, parameters, **self._options)

    @property
    def _can_plan(self) -> bool:
        """Whether steps can be planned.

        On an accelerator they are not: the host is ahead of the device, which does not wait for agreements.
        """
        return self._mark is not None and next(iter(self._slots)).is_cpu

    def _request_lane(self) -> None:
        """After the first step, request a lane for all gradients that are not sparse."""
        assert self._mark is not None
        planned: list[tuple[str, list[Tensor]]] = []
        for bucket in self._buckets:
            parameters = [slot.parameter for slot in bucket.slots if not slot.sparse]
            bucket.part = len(planned) if parameters else None
            if parameters and not planned:
                parameters.append(self._mark)
            if parameters:
                planned.append((bucket.name, parameters))
        is_useful = all(
            slot.parameter.grad is None or slot.parameter.grad.dtype == slot.parameter.dtype
            for slot in self._slots.values()
        )
        self._plans.request_lane(planned, is_useful and bool(planned))


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
