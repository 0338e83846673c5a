"""Copy the state of a run after a step, so that training cannot change it while it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch

from lockstep.models.nested import leaves
from lockstep.world import accelerator

Tensors = dict[str, torch.Tensor]
PINNED = 0.25  # share of the free memory to pin at most; the system cannot swap it, and torch keeps it


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


class HostCopies:
    """Copies a state to the host; from devices with streams, asynchronously into pinned memory.

    Asynchronous copies run on a separate stream, so call `protect` before changing the copied tensors. If a state is so
    large that pinning it could use up the host's memory, the host waits for the rest of its copies.

    Args:
        workers: The number of workers on this host, which share its memory.
    """

    def __init__(self, device: torch.device, workers: int = 1):
        self._device = device
        self._workers = workers
        self._pinned = self._most_pinned = 0  # bytes: of this state, and of the largest so far
        self._limit = 0
        self._side = accelerator.new_stream(device) if accelerator.overlaps(device) else None
        self._held: list[torch.Tensor] = []
        self._copied: torch.Event | None = None

    def steady(self, tensors: Tensors) -> Tensors:
        """Return the tensors, or clones on the device if copying is asynchronous; the clones need no `protect`."""
        return {name: tensor.clone() for name, tensor in tensors.items()} if self._side else tensors

    @contextmanager
    def making(self) -> Iterator[Callable[[], None]]:
        """Surround `copy`. Yield a function that waits for the copies, on any thread, after the block."""
        if self._side is None:
            yield lambda: None
            return
        copied = accelerator.new_event(self._device)
        self._most_pinned = max(self._pinned, self._most_pinned)
        free = int(PINNED * psutil.virtual_memory().available / self._workers)
        self._pinned, self._limit = 0, max(free, self._most_pinned)  # torch has kept what was pinned before

        def wait() -> None:
            accelerator.use(self._device)
            copied.synchronize()

        self._side.wait_stream(accelerator.current_stream(self._device))
        with accelerator.on(self._side):
            yield wait
        self._side.record_event(copied)
        self._copied = copied

    def copy(self, state: Any) -> Any:
        """Copy nested mappings and lists, such as a state_dict, with all tensors on the CPU."""
        if isinstance(state, torch.Tensor):
            return self._copy(state.detach())
        if isinstance(state, TensorShard):
            return replace(state, tensor=self._copy(state.tensor))
        if isinstance(state, Mapping):
            return {key: self.copy(value) for key, value in state.items()}
        if isinstance(state, list | tuple):
            return type(state)([self.copy(value) for value in state])
        return deepcopy(state)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = self._pinned + (1 << max(0, tensor.nbytes - 1).bit_length())  # torch pins powers of two
        if self._side is None or tensor.device.type != self._device.type or pinned > self._limit:
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._pinned = pinned
        self._held.append(tensor)  # keeps its memory from being reused before it is copied
        return accelerator.pinned_like(tensor).copy_(tensor, non_blocking=True)

    def protect(self) -> None:
        """Make the device finish the copies before later work; the host does not wait."""
        if self._copied is not None:
            accelerator.current_stream(self._device).wait_event(self._copied)
            self._copied = None
            self._held.clear()
