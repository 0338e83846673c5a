"""Reduces gradients while the backward pass is still computing other gradients.

Buckets depend only on the order of the parameters, and on which of them are frozen, so that the same tensors are always
reduced together, in whatever order their gradients are computed. A bucket is one grouped in-place all-reduce; its last
gradient starts it.

The end of a backward pass waits for the reductions that it has started, so that the script may then read and change
gradients. Some gradients can be missing at that point: they may belong to a later backward pass, or to other workers.
Their buckets are reduced by `finish`, which raises an error if the script has changed a gradient in between.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from lockstep.hvd.engine import context as engine
from lockstep.hvd.engine.request import MAX
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.ops.allreduce import allreduce
from lockstep.hvd.optimizer.buckets import BUCKET_BYTES, Bucket, GradientSlot, UnreducedGradients, plan_buckets
from lockstep.hvd.optimizer.reductions import GradientOptions, Reductions

Tensor = torch.Tensor

TOO_MANY_BACKWARDS = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
NO_TASK = -1  # outside of backward passes

_reducers: weakref.WeakSet[Gradients] = weakref.WeakSet()
_finishes = itertools.count(1)
_last_finish = 0  # of any reducer


class Gradients:
    """Reduces the gradients of named parameters over a process set.

    Args:
        named_parameters: All parameters of the optimizer, in the same order on all workers.
        prefix: Of the names of operations, the same on all workers.
        owner: The optimizer, whose parameters may change, and whose user may change gradients. None if the parameters
            stay the same and `finish` follows each backward pass.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        options: GradientOptions,
        prefix: str = "",
        owner: Any = None,
    ) -> None:
        context = engine.get()
        self._context = engine.current
        self._passes = options.passes
        self._slots: dict[Tensor, GradientSlot] = {}
        self._known: list[int] = []  # identities of the parameters that required gradients in the last step
        self._buckets: list[Bucket] = []
        self._started = Reductions(options)
        self._has_arrivals = False
        self._finish_before = 0  # the last finish before the last backward pass
        self._graph_task = NO_TASK  # the backward pass whose end calls `_end_backward`
        self._late: list[GradientSlot] = []  # parameters with a gradient that other hooks may still change
        self._owner = None if owner is None else weakref.ref(owner)  # its hooks would keep it alive
        self._unreduced = UnreducedGradients()
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        _stop_former({parameter for _, parameter in named_parameters})
        self._prefix = prefix
        self._planned = 0  # buckets, including those that are empty by now
        _reducers.add(self)
        self._bucket_bytes = min(BUCKET_BYTES, context.settings.fusion_threshold_bytes)
        for group in options.groups:
            self._add_bucket([named_parameters[index] for index in group])
        grouped = {index for group in options.groups for index in group}
        self._add([named for index, named in enumerate(named_parameters) if index not in grouped])

    def _add_bucket(self, named_parameters: Sequence[tuple[str, Tensor]]) -> None:
        bucket = Bucket(f"{self._prefix}bucket {self._planned}", missing=len(named_parameters))
        self._planned += 1
        for name, parameter in named_parameters:
            slot = GradientSlot(self._prefix + name, parameter, bucket, self._passes)
            bucket.slots.append(slot)
            self._slots[parameter] = slot
            # Weak references, since the garbage collector cannot see what hooks reference.
            hook = partial(_arrived, weakref.ref(self), weakref.ref(slot))
            slot.hook = parameter.register_post_accumulate_grad_hook(hook)
            self._hooks.append(slot.hook)
        self._buckets.append(bucket)

    def _add(self, named_parameters: Sequence[tuple[str, Tensor]]) -> None:
        sizes_bytes = [parameter.nbytes for _, parameter in named_parameters]
        for indices in plan_buckets(sizes_bytes, self._bucket_bytes):
            self._add_bucket([named_parameters[index] for index in indices])

    def follow_parameters(self) -> None:
        """Follow the optimizer if a parameter has been added, removed, replaced or unfrozen."""
        owner = None if self._owner is None else self._owner()
        if owner is None:
            return
        known = [id(p) for group in owner._own_param_groups() for p in group["params"] if p.requires_grad]
        if known == self._known:  # a cheap comparison, since each step makes some
            return
        self._known = known
        names = {parameter: name for name, parameter in owner._named_own_parameters()}
        for parameter in [parameter for parameter in self._slots if parameter not in names]:
            slot = self._slots.pop(parameter)
            slot.hook.remove()
            slot.bucket.remove(slot)
        self._buckets = [bucket for bucket in self._buckets if bucket.slots]
        self._add([(name, p) for p, name in names.items() if p.requires_grad and p not in self._slots])

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

    def _reduced(self, slot: GradientSlot) -> Tensor | None:
        if slot.bucket in self._started:
            self._started.wait_for(slot.bucket)
            self._unreduced.forget(slot.bucket)
        return slot.parameter.grad

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are summed before the reduction."""
        self._passes = passes
        for slot in self._slots.values():
            slot.passes_left = passes

    def reset(self) -> None:
        """Discard the reductions in progress and start a new step."""
        self._started.clear()
        self._late.clear()
        self._unreduced.clear()
        self._has_arrivals = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
            bucket.request = None  # which holds gradients
            for slot in bucket.slots:
                slot.passes_left = self._passes

    def discard(self) -> bool:
        """Discard the gradients that another optimizer's loss has left, as in a GAN, if that one has stepped since.

        Return whether no new gradient is left.
        """
        if self.in_flight and self._finish_before != _last_finish:
            try:
                self._started.wait()
            finally:
                self.reset()
        return not self._has_arrivals

    def _are_cleared(self, arrived: GradientSlot) -> bool:
        """Return whether the script has cleared the gradients of earlier passes itself, as by `model.zero_grad()`."""
        earlier = [slot for slot in self._slots.values() if slot is not arrived and slot.passes_left < self._passes]
        gradients = [slot.parameter.grad for slot in earlier]
        return bool(earlier) and all(grad is None or not (grad.is_sparse or grad.any()) for grad in gradients)

    def finish(self) -> None:
        """Wait until all gradients are reduced; first start the remaining buckets, with zeros for missing gradients.

        Raises:
            HorovodInternalError: The requests do not match, or a worker disconnected.
            RuntimeError: A gradient has been changed since the end of the backward pass.
        """
        global _last_finish
        self._follow_context()
        _last_finish = next(_finishes)
        unused: list[GradientSlot] = []
        try:
            self._unreduced.check(self._slots.values())
            self.follow_parameters()
            unused = self._unused()
            self._set_frozen_apart()
            self._start_rest()
            self._started.wait()
            self._start_rest()  # those that were given back, because the backward pass has not reached its end
        finally:
            try:
                self._started.wait()
            finally:
                self.reset()
        for slot in unused:
            slot.parameter.grad = None  # was zeros for the reduction

    def _unused(self) -> list[GradientSlot]:
        """Return the parameters without a gradient on any worker that the script has excepted from updates."""
        owner = None if self._owner is None else self._owner()
        if owner is None or owner._required is None:
            return []
        slots = [slot for slot in self._slots.values() if slot.parameter not in owner._required]
        if not slots:
            return []
        uses = torch.tensor([slot.parameter.grad is not None for slot in slots], dtype=torch.int32, device="cpu")
        any_uses = allreduce(uses, name=f"{self._prefix}uses", op=MAX, process_set=self._started.process_set)
        return [slot for slot, is_used in zip(slots, any_uses.tolist(), strict=True) if not is_used]

    def _start_rest(self) -> None:
        for bucket in self._buckets:
            if bucket not in self._started:
                self._started.start(bucket, revocable=False)

    def _end_backward(self) -> None:
        """Wait for what the backward pass has started; called by autograd at its end."""
        self._graph_task = NO_TASK
        if self._context is not engine.current:
            return
        late, self._late = self._late, []
        for slot in late:
            self._count(slot)
        self.follow_parameters()
        for bucket in self._set_frozen_apart():
            if bucket.missing == 0:
                self._started.start(bucket)
        has_failed = False
        for bucket in list(self._started):
            if bucket.request is not None:
                try:
                    self._started.wait_for(bucket)
                except HorovodInternalError:  # `finish` raises it
                    has_failed = True
        if self._owner is not None and not has_failed and self._is_unreduced():
            self._unreduced.note(self._slots.values())

    def _set_frozen_apart(self) -> list[Bucket]:
        """Move frozen parameters without a gradient to buckets of their own; return the buckets that they have left."""
        left: list[Bucket] = []
        for bucket in list(self._buckets):
            if bucket in self._started:
                continue
            frozen = [slot for slot in bucket.slots if slot.passes_left > 0 and not slot.parameter.requires_grad]
            if not 0 < len(frozen) < len(bucket.slots):
                continue
            self._buckets.insert(self._buckets.index(bucket) + 1, bucket.split_off(frozen))
            left.append(bucket)
        return left

    def _is_unreduced(self) -> bool:
        """Return whether gradients of this step have yet to be reduced, or were by peers that have called `step`."""
        for bucket in self._buckets:
            if bucket.request is not None and bucket.request.has_late_peer:
                return True
            is_frozen = all(slot.passes_left > 0 and not slot.parameter.requires_grad for slot in bucket.slots)
            if self._started.get(bucket, True) and not is_frozen:
                return True
        return False

    def _follow_context(self) -> None:
        """After hvd.shutdown() and hvd.init(), discard the earlier reductions."""
        if self._context is not engine.current:
            self._context = engine.current
            self.reset()

    def arrived(self, slot: GradientSlot) -> None:
        """Count a backward pass for a parameter; the last one of a bucket starts its reduction."""
        self._follow_context()
        # Without public names: DistributedDataParallel and FSDP, too, learn from these of the end of a backward pass.
        # Nested passes, as of reentrant checkpoints, have numbers and ends of their own.
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            if self._has_arrivals and self._finish_before != _last_finish and self._are_cleared(slot):
                self.discard()
            self._finish_before = _last_finish
            self._has_arrivals = True
            self._unreduced.compare(slot)
            Variable._execution_engine.queue_callback(self._end_backward)
        hooks: Any = slot.parameter._post_accumulate_grad_hooks  # there is no public way to their order
        if len(hooks) > 1 and next(reversed(hooks)) != slot.hook.id:
            hooks.move_to_end(slot.hook.id)
            self._late.append(slot)
        else:
            self._count(slot)

    def _count(self, slot: GradientSlot) -> None:
        slot.passes_left -= 1
        if slot.passes_left > 0:
            return
        if slot.passes_left < 0 or slot.bucket in self._started:
            raise AssertionError(TOO_MANY_BACKWARDS)
        slot.bucket.missing -= 1
        if slot.bucket.missing == 0:
            self._started.start(slot.bucket)


def _arrived(gradients: weakref.ref[Gradients], slot: weakref.ref[GradientSlot], _: Tensor) -> None:
    """Autograd hook, called after a parameter's gradient has been accumulated."""
    if torch.compiler.is_compiling():  # a hook that is compiled cannot learn of the end; `finish` reduces everything
        return
    reducer, known = gradients(), slot()
    if reducer is not None and known is not None:
        reducer.arrived(known)


def _stop_former(parameters: set[Tensor]) -> None:
    """Stop the reducers of earlier optimizers that have some of these parameters."""
    for reducer in list(_reducers):
        if parameters & reducer._slots.keys():
            _remove(reducer._hooks)
            _reducers.discard(reducer)


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
