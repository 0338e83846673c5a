"""The base class of both kinds of DistributedOptimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler

from lockstep.hvd.compression import Compressor
from lockstep.hvd.optimizer.replica_watch import ReplicaWatch

SCALER_METHODS = ("_unscale_grads_", "unscale_")  # those of torch's GradScaler, and of subclasses of it


class Wrapper:
    """Shares the parameter groups, state and hooks of the wrapped optimizer.

    A scheduler or GradScaler may be attached to either optimizer. `DistributedOptimizer` sets the attributes; those
    that scripts and libraries read have Horovod's names. Others must not have the names of attributes that optimizers
    have, since they would hide these or be hidden by them.
    """

    state: dict[torch.Tensor, Any]
    _parameter_names: dict[torch.Tensor, str]  # sorted by name
    _compression: type[Compressor]
    _wrapped: torch.optim.Optimizer
    _replica_watch: ReplicaWatch | None = None  # None if nothing is exchanged with other workers

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
        return name_parameters(self._own_param_groups(), self._parameter_names)

    def prepare_for_scaler(self) -> None:
        """Make a GradScaler that looks at the gradients decide the same on all workers."""

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters whose gradients or steps are exchanged with the other workers."""
        return {parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad}

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
    """Return all parameters with their names; those without a name are numbered."""
    return [
        (names.get(parameter, f"allreduce.noname.{number}.{index}"), parameter)
        for number, group in enumerate(param_groups)
        for index, parameter in enumerate(group["params"])
    ]
