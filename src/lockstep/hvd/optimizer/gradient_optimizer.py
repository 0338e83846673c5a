"""DistributedOptimizer for every operation but Adasum: the step follows the reduced gradients of all workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.hvd.engine.reduction import AVERAGE, SUM
from lockstep.hvd.ops.allreduce import allreduce, allreduce_async_
from lockstep.hvd.ops.sparse import sparse_allreduce_async
from lockstep.hvd.optimizer.gradient_reducer import Gradients
from lockstep.hvd.optimizer.wrapper import Wrapper, name_parameters
from lockstep.hvd.process_sets import ProcessSet

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
    """Stands in front of the user's optimizer class. Its attributes are set by `DistributedOptimizer`.

    Of the public ones, `backward_passes_per_step` may be changed; the others say how the gradients are reduced.
    """

    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _passes: int
    _gradients: Gradients | None  # None where nothing is to be reduced
    _synchronizes = True
    _synchronized = False

    def synchronize(self) -> None:
        """Wait until the gradients of all parameters are reduced.

        Raises:
            HorovodInternalError: The workers do not agree, or one is lost.
        """
        if self._gradients is not None:
            if self._may_have_new_parameters():
                self._gradients.take_in(name_parameters(self.param_groups, self._parameter_names))
            self._gradients.finish()
        self._synchronized = True

    def _may_have_new_parameters(self) -> bool:
        """Whether a parameter has been added, or was frozen at first: a cheap look, since every step takes it."""
        assert self._gradients is not None
        return self._gradients.parameters < sum(len(group["params"]) for group in self.param_groups)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, `step` takes the gradients as they are, after an explicit `synchronize`."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    @property
    def backward_passes_per_step(self) -> int:
        """The backward passes over which gradients add up before they are reduced; may be set between two steps."""
        return self._passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Let gradients add up over another number of backward passes before they are reduced.

        Raises:
            ValueError: The number is not positive.
        """
        check_passes(passes)
        self._passes = passes
        if self._gradients is not None:
            self._gradients.set_passes(passes)

    @property
    def _handles(self) -> dict[Tensor, tuple[Callable[[], Any] | None, Any]]:
        """By parameter whose gradient has come: what waits for its reduction, or None where that has not begun."""
        return {} if self._gradients is None else self._gradients.in_flight_by_parameter()

    def _allreduce_grad_async(self, parameter: Tensor) -> tuple[Any, Any]:
        """Reduce one parameter's gradient by itself: the handle, or the function that waits, and what decompress needs.

        For code that reduces gradients when it likes, instead of this optimizer's own reduction.
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
        """Reduce the gradients, unless that is skipped, and take the step.

        With a closure, the gradients that it computes are reduced each time it is called, and the loss it returns is
        reduced as they are, since some optimizers decide by it.
        """
        in_flight = self._gradients is not None and self._gradients.in_flight
        if self._synchronizes and self._synchronized:
            warnings.warn(STEP_AFTER_SYNCHRONIZE, stacklevel=2)
        if self._synchronizes and (in_flight or (closure is None and not self._synchronized)):
            self.synchronize()
        self._synchronized = False
        if closure is not None and self._synchronizes and self._gradients is not None:
            closure = self._synchronized_closure(closure)
        return self.take_step(closure)

    step.hooked = True  # type: ignore[attr-defined] # the step below runs the optimizer's hooks

    def _synchronized_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        operation = SUM if self.op == SUM else AVERAGE

        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            if loss is None:
                return None
            if isinstance(loss, Tensor):
                return allreduce(loss.detach(), op=operation, process_set=self.process_set)
            number = torch.tensor(loss, dtype=torch.float64)
            return allreduce(number, op=operation, process_set=self.process_set).item()

        return synchronized

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: They are being reduced.
        """
        if self._gradients is not None and self._gradients.in_flight:
            raise AssertionError(ZERO_GRAD_TOO_EARLY)
        self._synchronized = False
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state; reductions in flight are forgotten."""
        if self._gradients is not None:
            self._gradients.reset()
        self._synchronized = False
        super().load_state_dict(state_dict)


def check_passes(passes: int) -> None:
    """Raises ValueError unless the number of backward passes is positive."""
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")
