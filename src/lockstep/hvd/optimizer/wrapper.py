"""The base class of both kinds of DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.hvd.compression import Compressor
from lockstep.hvd.optimizer.replica_watch import ReplicaWatch


class Wrapper:
    """Shares the parameter groups, state and hooks of the wrapped optimizer.

    A scheduler or GradScaler may be attached to either optimizer. `DistributedOptimizer` sets the attributes; those
    that scripts and libraries read have Horovod's names.
    """

    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, Any]
    _parameter_names: dict[torch.Tensor, str]  # sorted by name
    _compression: type[Compressor]
    _wrapped: torch.optim.Optimizer
    _replica_watch: ReplicaWatch | None = None  # None if the workers' weights may differ

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
            self._replica_watch.end_step(lambda: name_parameters(self.param_groups, self._parameter_names))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, into the wrapped optimizer too."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._wrapped.param_groups, self._wrapped.state = self.param_groups, self.state  # type: ignore[assignment]


def name_parameters(
    param_groups: Sequence[dict[str, Any]], names: dict[torch.Tensor, str]
) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters with their names; those without a name are numbered."""
    return [
        (names.get(parameter, f"allreduce.noname.{number}.{index}"), parameter)
        for number, group in enumerate(param_groups)
        for index, parameter in enumerate(group["params"])
    ]
