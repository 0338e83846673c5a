"""The state of a run after a step, copied to memory of its own, so that nothing changes it while it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.world import accelerator

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step. `about` describes the model; `job` what a resumed run must share.

    `wait` is to be called, on any thread, before tensors are read.
    """

    step: int
    model: Tensors
    optimizer: Mapping[str, Any]
    progress: Mapping[str, Any]
    about: Mapping[str, Any]
    job: Mapping[str, Any] = field(default_factory=dict)
    average: Tensors = field(default_factory=dict)
    strategy: Tensors = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    wait: Callable[[], None] = lambda: None

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
        for state in (self.model, self.average, self.strategy, self.optimizer):
            yield from _tensors_in(state)


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """The tensors in a state, however deep in mappings and lists, as L-BFGS keeps them."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors_in(value)


class HostCopies:
    """Copies a state to the host; from a device with streams into pinned memory, while the device goes on.

    Those copies are made on a stream of their own, so `protect` has to come before anything changes what was copied.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._side = accelerator.new_stream(device) if accelerator.overlaps(device) else None
        self._held: list[torch.Tensor] = []
        self._copied: torch.Event | None = None

    def steady(self, tensors: Tensors) -> Tensors:
        """The tensors, or where copies take their time copies on the device, which `protect` need not precede."""
        return {name: tensor.clone() for name, tensor in tensors.items()} if self._side else tensors

    @contextmanager
    def making(self) -> Iterator[Callable[[], None]]:
        """Around `copy`; gives what waits for the copies, on any thread, after this has ended."""
        if self._side is None:
            yield lambda: None
            return
        copied = accelerator.new_event(self._device)

        def wait() -> None:
            accelerator.use(self._device)
            copied.synchronize()

        self._side.wait_stream(accelerator.current_stream(self._device))
        with accelerator.on(self._side):
            yield wait
        self._side.record_event(copied)
        self._copied = copied

    def copy(self, state: Any) -> Any:
        """A state_dict, or any nest of mappings and lists, with all tensors on the CPU and all else copied, too."""
        if isinstance(state, torch.Tensor):
            return self._copy(state.detach())
        if isinstance(state, Mapping):
            return {key: self.copy(value) for key, value in state.items()}
        if isinstance(state, list | tuple):
            return type(state)([self.copy(value) for value in state])
        return deepcopy(state)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._side is None or tensor.device.type != self._device.type:
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._held.append(tensor)  # or its memory might be reused before it is copied
        return accelerator.pinned_like(tensor).copy_(tensor, non_blocking=True)

    def protect(self) -> None:
        """Have the device finish the copies before it does what it is asked next; the host does not wait."""
        if self._copied is not None:
            accelerator.current_stream(self._device).wait_event(self._copied)
            self._copied = None
            self._held.clear()
