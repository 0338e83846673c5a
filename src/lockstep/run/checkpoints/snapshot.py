"""Copy the state of a run after a step, so that training cannot change it while it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lockstep.models.nested import leaves
from lockstep.world.host_memory import PinnedCopies

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TensorShard:
    """A worker's part of a sharded tensor: of the whole's `shape`, what begins at `start`.

    `is_stored`: whether this worker stores it; else `tensor` is empty.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    is_stored: bool

    @property
    def nbytes(self) -> int:
        """The size of the whole."""
        return math.prod(self.shape) * self.tensor.element_size()


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step. `about` describes the model; `job` has settings that a resumed run must share.

    `states` has everything else by name, such as the optimizer's `state_dict`. Tensors that are sharded over the
    workers are `TensorShard`s. Call `wait`, on any thread, before reading tensors.
    """

    step: int
    model: Tensors
    states: Mapping[str, Any]
    progress: Mapping[str, Any]
    about: Mapping[str, Any]
    job: Mapping[str, Any] = field(default_factory=dict)
    wait: Callable[[], None] = lambda: None

    @property
    def size_bytes(self) -> int:
        """The size of its tensors in memory, and approximately on disk."""
        parts = leaves([self.model, self.states])
        return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor | TensorShard))

    @property
    def usable(self) -> Tensors:
        """The weights to use: the moving average if there is one."""
        prefix = "module."
        average = self.states.get("average", {})
        averaged = {name.removeprefix(prefix): each for name, each in average.items() if name.startswith(prefix)}
        return averaged or self.model


class HostCopies(PinnedCopies):
    """Copies a state to the host; from devices with streams, asynchronously into pinned memory."""

    def copy(self, state: Any) -> Any:
        """Copy nested mappings and lists, such as a state_dict, with all tensors on the CPU."""
        if isinstance(state, torch.Tensor):
            return self.copy_tensor(state.detach())
        if isinstance(state, TensorShard):
            return replace(state, tensor=self.copy_tensor(state.tensor))
        if isinstance(state, Mapping):
            return {key: self.copy(value) for key, value in state.items()}
        if isinstance(state, list | tuple):
            return type(state)([self.copy(value) for value in state])
        return deepcopy(state)
