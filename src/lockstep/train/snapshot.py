"""The state of a run after a step, copied to memory of its own, so that nothing changes it while it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step. `about` describes the model; `job` what a resumed run must share."""

    step: int
    model: Tensors
    optimizer: Mapping[str, Any]
    progress: Mapping[str, Any]
    about: Mapping[str, Any]
    job: Mapping[str, Any] = field(default_factory=dict)
    average: Tensors = field(default_factory=dict)
    strategy: Tensors = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """What its tensors take, in memory and, nearly, on a disk."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def usable(self) -> Tensors:
        """The weights to use: the moving average's where one was kept."""
        prefix = "module."
        averaged = {name.removeprefix(prefix): t for name, t in self.average.items() if name.startswith(prefix)}
        return averaged or self.model

    def _tensors(self) -> Iterator[torch.Tensor]:
        for tensors in (self.model, self.average, self.strategy, *self.optimizer["state"].values()):
            yield from (value for value in tensors.values() if isinstance(value, torch.Tensor))


def copy_state(state: Any) -> Any:
    """A state_dict, or any nest of mappings and lists, with all tensors copied to the CPU and all else copied too."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(state, Mapping):
        return {key: copy_state(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([copy_state(value) for value in state])
    return deepcopy(state)
