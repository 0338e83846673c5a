"""DistributedOptimizer for all operations except Adasum: steps use the reduced gradients of all workers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler

from lockstep.hvd.compression import Compressor
from lockstep.hvd.engine.request import AVERAGE, SUM
from lockstep.hvd.ops.allreduce import allreduce, allreduce_async_
from lockstep.hvd.ops.rows import sparse_allreduce_async
from lockstep.hvd.optimizer.gradient_reducer import Gradients
from lockstep.hvd.optimizer.replica_watch import ReplicaWatch
from lockstep.hvd.process_sets import ProcessSet

NONAME = "allreduce.noname"  # begins the names of parameters that the script has not named
SCALER_METHODS = ("_unscale_grads_", "unscale_")  # those of torch's GradScaler, and of subclasses of it


class Wrapper:
    """Shares the parameter groups, state and hooks of the wrapped optimizer.

    A scheduler or GradScaler may be attached to either optimizer. `DistributedOptimizer` sets the attributes; those
    that scripts and libraries read have Horovod's names. Others must not have the names of attributes that optimizers
    have, since they would hide these or be hidden by them.
    """

    state: dict[torch.Tensor, Any]
    _parameter_names: dict[torch.Tensor, str]  # sorted by name, as in Horovod
    _ordered_names: dict[torch.Tensor, str]  # in an order that is the same on all workers
    _compression: type[Compressor]
    _wrapped: torch.optim.Optimizer
    _made_of: tuple[Any, bool, str]  # the options, whether it is Adasum, and the prefix of the names of operations
    _replica_watch: ReplicaWatch | None = None  # None if nothing is exchanged with other workers
    _required: set[torch.Tensor] | None = None  # what the script has assigned to `_requires_update`

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as in any optimizer.

        When a GradScaler reads them, it is about to decide from the gradients whether to skip the step.
        """
        if self._replica_watch is not None and _is_in_scaler(sys._getframe(1)):
            self.prepare_for_scaler()
        return self._own_param_groups()

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def _own_param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups; the wrapped class may have a property for them."""
        groups: list[dict[str, Any]] | None = self.__dict__.get("param_groups")
        return super().param_groups if groups is None else groups  # type: ignore[misc]

    def _named_own_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return all parameters that the optimizer has now, with their names."""
        return name_parameters(self._own_param_groups(), self._ordered_names)

    def prepare_for_scaler(self) -> None:
        """Make a GradScaler that looks at the gradients decide the same on all workers."""

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters that the optimizer updates even if no worker computes their gradients, which are then zero.

        Scripts assign the empty set, so that weight decay and momentum leave unused parameters alone.
        """
        if self._required is not None:
            return self._required
        return {parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad}

    @_requires_update.setter
    def _requires_update(self, parameters: set[torch.Tensor]) -> None:
        self._required = parameters

    def take_step(self, closure: Callable[[], Any] | None) -> Any:
        """Run the wrapped class's step."""
        result = super().step(closure)  # type: ignore[misc]
        self._wrapped._opt_called = True  # type: ignore[attr-defined] # checked by the wrapped one's scheduler
        return result

    def watch_replicas(self) -> None:
        """Compare the workers' weights after a step, if it is time.

        Raises:
            ReplicasDifferError: They differ, now or at the last comparison.
        """
        if self._replica_watch is not None:
            self._replica_watch.end_step(self._named_own_parameters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, into the wrapped optimizer too."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._wrapped.param_groups, self._wrapped.state = self.param_groups, self.state  # type: ignore[assignment]


def _is_in_scaler(frame: FrameType) -> bool:
    """Return whether this is the frame of a GradScaler's method that looks at the gradients."""
    # The name first, since `f_locals` keeps a frame's tensors alive until the frame ends.
    return frame.f_code.co_name in SCALER_METHODS and isinstance(frame.f_locals.get("self"), GradScaler)


def name_parameters(
    param_groups: Sequence[dict[str, Any]], names: dict[torch.Tensor, str]
) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters with their names, in the order of `names`; those without a name are numbered, and last."""
    own = {
        parameter: f"{NONAME}.{number}.{index}"
        for number, group in enumerate(param_groups)
        for index, parameter in enumerate(group["params"])
    }
    named = [(name, parameter) for parameter, name in names.items() if parameter in own]
    return named + [(number, parameter) for parameter, number in own.items() if parameter not in names]


Tensor = torch.Tensor

STEP_AFTER_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)


class GradientOptimizer(Wrapper):
    """Mixin that `DistributedOptimizer` puts before the user's optimizer class; it also sets the attributes.

    Only `backward_passes_per_step` and `_requires_update` may be changed afterwards.
    """

    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _passes: int
    _gradients: Gradients  # of no parameters if nothing is reduced
    _should_synchronize = True
    _synchronized = False
    _reduced_for_scaler = False  # since the last step

    def prepare_for_scaler(self) -> None:
        """Reduce the gradients, so that the scaler's decision is the same on all workers."""
        is_reduced = self._synchronized or self._reduced_for_scaler
        if self._should_synchronize and (self._gradients.in_flight or not is_reduced):
            self._gradients.finish()
            self._reduced_for_scaler = True

    def synchronize(self) -> None:
        """Wait until the gradients of all parameters are reduced.

        Raises:
            HorovodInternalError: The requests do not match, or a worker disconnected.
            RuntimeError: A gradient has been changed before all of them were reduced.
        """
        if self._gradients.in_flight or not self._reduced_for_scaler:
            self._gradients.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context manager in which `step` does not reduce, for use after an explicit `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes whose gradients are summed before the reduction; set it between steps."""
        return self._passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are summed before the reduction.

        Raises:
            ValueError: The number is not positive.
        """
        check_passes(passes)
        self._passes = passes
        self._gradients.set_passes(passes)

    @property
    def _handles(self) -> dict[Tensor, tuple[Callable[[], Any] | None, Any]]:
        """For each parameter with a new gradient, a function that waits for its reduction; None before its start."""
        return self._gradients.in_flight_by_parameter()

    def _allreduce_grad_async(self, parameter: Tensor) -> tuple[Any, Any]:
        """Start reducing one parameter's gradient separately.

        For code that schedules the reduction itself.

        Returns:
            A handle for `synchronize` (for sparse gradients, a function that waits), and the context for the
            compression's `decompress`.
        """
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        name, gradient = self._parameter_names.get(parameter), parameter.grad
        if gradient.is_sparse and not self.sparse_as_dense:
            return sparse_allreduce_async(gradient, name or "noname", self.op, self.process_set), None
        tensor, context = self._compression.compress(gradient.to_dense() if gradient.is_sparse else gradient)
        scales = 1 / self.gradient_predivide_factor, self.gradient_predivide_factor
        return allreduce_async_(tensor, None, name, self.op, *scales, self.process_set), context

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, unless `skip_synchronize` is active, and take the step.

        With a closure, gradients are reduced after each call, and so is the loss it returns, since some optimizers
        use it for decisions.
        """
        if self._should_synchronize and self._synchronized:
            warnings.warn(STEP_AFTER_SYNCHRONIZE, stacklevel=2)
        is_reduced = self._synchronized or self._reduced_for_scaler
        if self._should_synchronize and (self._gradients.in_flight or (closure is None and not is_reduced)):
            self.synchronize()
        self._start_over()
        if closure is not None and self._should_synchronize and self._replica_watch is not None:
            closure = self._synchronized_closure(closure)
        result = self.take_step(closure)
        self.watch_replicas()
        return result

    step.hooked = True  # type: ignore[attr-defined] # the wrapped class's step runs the optimizer's hooks

    def _synchronized_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        operation = SUM if self.op == SUM else AVERAGE

        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            self._start_over()
            if loss is None:
                return None
            if isinstance(loss, Tensor):
                return allreduce(loss.detach(), op=operation, process_set=self.process_set)
            number = torch.tensor(loss, dtype=torch.float64, device="cpu")
            return allreduce(number, op=operation, process_set=self.process_set).item()

        return synchronized

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: There are new gradients, and no other optimizer has taken a step with the same loss.
        """
        if not self._gradients.discard():
            raise AssertionError(ZERO_GRAD_TOO_EARLY)
        self._start_over()
        self._gradients.follow_parameters()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose gradients are reduced, too."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._gradients.follow_parameters()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; discards the results of reductions in progress."""
        self._gradients.reset()
        self._start_over()
        super().load_state_dict(state_dict)

    def _start_over(self) -> None:
        self._synchronized = self._reduced_for_scaler = False


def check_passes(passes: int) -> None:
    """Raise ValueError unless the number of backward passes is positive."""
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, got {passes}")
