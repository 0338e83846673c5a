"""The state of a run after a step: copied, so that training cannot change it, and split into JSON and tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
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


# A mapping with one of these as its only key stands for a tensor, a mapping with other keys, or a tuple.
TENSOR, PAIRS, TUPLE = "tensor of this name", "pairs", "tuple"
MARKS = ({TENSOR}, {PAIRS}, {TUPLE})


def split_state(value: Any, key: str, tensors: dict[str, Any]) -> Any:
    """Return a state as JSON values; its tensors are added to `tensors` as they are, by their place: KEY.NAME.INDEX.

    Tensors may be `TensorShard`s; those that `join_state` gets may be in files.

    Raises:
        TypeError: A value can be neither; the message says where it is.
    """
    if isinstance(value, torch.Tensor | TensorShard):
        while key in tensors:  # such as "a.b" in one mapping and "b" in its "a"
            key += "_"
        tensors[key] = value
        return {TENSOR: key}
    prefix = f"{key}." if key else ""
    if isinstance(value, Mapping):
        parts = {name: split_state(each, f"{prefix}{name}", tensors) for name, each in value.items()}
        if all(isinstance(name, str) for name in parts) and parts.keys() not in MARKS:
            return parts
        for name in parts:
            _check(name, f"a key of {key or 'the state'}")
        return {PAIRS: [[name, each] for name, each in parts.items()]}
    if isinstance(value, list | tuple):
        items = [split_state(each, f"{prefix}{index}", tensors) for index, each in enumerate(value)]
        return items if isinstance(value, list) else {TUPLE: items}
    _check(value, key)
    return value


def _check(value: Any, where: str) -> None:
    if not (value is None or isinstance(value, bool | int | float | str)):
        fix = " of NumPy (convert it with .item())" if isinstance(value, np.generic) else ""
        raise TypeError(f"{where} is a {type(value).__name__}{fix}")
    if isinstance(value, int) and value.bit_length() > 63:  # such as in the state of a NumPy generator
        raise TypeError(f"{where} is an integer of more than 64 bits")


def join_state(value: Any, tensors: dict[str, Any]) -> Any:
    """Undo `split_state`.

    Raises:
        KeyError, TypeError, ValueError: The values are not from `split_state`, or a tensor is missing.
    """
    if isinstance(value, list):
        return [join_state(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        return tensors[value[TENSOR]]
    if value.keys() == {TUPLE}:
        return tuple(join_state(each, tensors) for each in value[TUPLE])
    if value.keys() == {PAIRS}:
        return {name: join_state(each, tensors) for name, each in value[PAIRS]}
    return {name: join_state(each, tensors) for name, each in value.items()}
