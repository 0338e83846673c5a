"""What both kinds of DistributedOptimizer have in common: they stand in front of the user's optimizer class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.hvd.compression import Compressor


class Wrapper:
    """An optimizer that has taken over another one's parameter groups, state and hooks.

    A scheduler or a GradScaler may know either of the two. The attributes are set by `DistributedOptimizer`; those that
    scripts and libraries read are named as in Horovod.
    """

    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, Any]
    _parameter_names: dict[torch.Tensor, str]  # by name, as on all workers
    _compression: type[Compressor]
    _wrapped: torch.optim.Optimizer

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters whose gradients, or steps, this optimizer exchanges with the other workers."""
        return {parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad}

    def take_step(self, closure: Callable[[], Any] | None) -> Any:
        """The step of the user's class."""
        result = super().step(closure)  # type: ignore[misc]
        self._wrapped._opt_called = True  # type: ignore[attr-defined] # a scheduler of the wrapped one looks at this
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, for the wrapped optimizer too."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._wrapped.param_groups, self._wrapped.state = self.param_groups, self.state  # type: ignore[assignment]


def name_parameters(
    param_groups: Sequence[dict[str, Any]], names: dict[torch.Tensor, str]
) -> list[tuple[str, torch.Tensor]]:
    """All parameters with their names, or with numbers where they have none."""
    return [
        (names.get(parameter, f"allreduce.noname.{number}.{index}"), parameter)
        for number, group in enumerate(param_groups)
        for index, parameter in enumerate(group["params"])
    ]
