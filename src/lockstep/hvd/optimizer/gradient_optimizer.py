"""DistributedOptimizer for every operation but Adasum: the step follows the reduced gradients of all workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.hvd.ops.allreduce import allreduce
from lockstep.hvd.optimizer.gradient_reducer import Gradients
from lockstep.hvd.optimizer.wrapper import Wrapper, name_parameters

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
    """Stands in front of the user's optimizer class. Its attributes are set by `DistributedOptimizer`."""

    _gradients: Gradients | None  # None where nothing is to be reduced
    _loss_operation: int
    _synchronizes = True
    _synchronized = False

    def synchronize(self) -> None:
        """Wait until the gradients of all parameters are reduced.

        Raises:
            HorovodInternalError: The workers do not agree, or one is lost.
        """
        if self._gradients is not None:
            if self._may_have_new_parameters():
                self._gradients.take_in(name_parameters(self.param_groups, self._names))
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

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Let gradients add up over another number of backward passes before they are reduced."""
        check_passes(passes)
        if self._gradients is not None:
            self._gradients.set_passes(passes)

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
        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            if loss is None:
                return None
            if isinstance(loss, Tensor):
                return allreduce(loss.detach(), op=self._loss_operation, process_set=self._process_set)
            number = torch.tensor(loss, dtype=torch.float64)
            return allreduce(number, op=self._loss_operation, process_set=self._process_set).item()

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
