"""Counts the training samples that a program's DataLoaders have delivered.

They are those of a loader's batches from the first one after which a backward pass runs before the loader ends: the
number of indices of map-style data, else the length of the batch's first tensor.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STATE = "_lockstep_state"  # the attribute of a loader's iterator
END = object()
MAX_OBJECTS = 1000  # of a batch, among which its tensors are looked for


@dataclass(eq=False)
class LoaderState:
    """What is known about one iterator of a DataLoader.

    Args:
        requested: The lengths of index lists whose batches have not been delivered; -1: the batch itself tells.
        trains: Whether a backward pass has run since it delivered its first batch.
        held: The samples before that.
        processes: The number of the loader's processes; -1: unknown.
    """

    requested: deque[int] = field(default_factory=deque)
    trains: bool = False
    held: int = 0
    processes: int = -1


class LoadedSamples:
    """The samples of this process; each method but `train` and `clear` is called for an event of a loader's iterator.

    Attributes:
        samples: The number of training samples so far.
        processes: The number of processes of the loader that trains; -1: there is none, or it is unknown.
    """

    def __init__(self) -> None:
        self.samples, self.processes = 0, -1
        self._abandoned = 0  # of a loader that was given up after a batch, before a backward pass
        self._untrained: set[LoaderState] = set()  # that have delivered batches since the last backward pass

    def clear(self) -> None:
        """Count from 0."""
        self.samples = self._abandoned = 0
        self._untrained.clear()

    def _state(self, iterator: Any) -> LoaderState:
        state: LoaderState | None = vars(iterator).get(STATE)
        if state is None:
            vars(iterator)[STATE] = state = LoaderState(processes=getattr(iterator, "_num_workers", -1))
            weakref.finalize(iterator, self._abandon, state).atexit = False
        return state

    def _abandon(self, state: LoaderState) -> None:
        self._untrained.discard(state)
        self._abandoned += state.held

    def request(self, iterator: Any, size: int) -> None:
        self._state(iterator).requested.append(size)

    def deliver(self, iterator: Any, batch: Any, has_gradients: bool) -> None:
        self._abandoned = 0
        state = self._state(iterator)
        size = state.requested.popleft() if state.requested else -1
        if not has_gradients:
            return
        size = first_length(batch) if size < 0 else size
        if state.trains:
            self.samples += size
        else:
            state.held += size
            self._untrained.add(state)

    def fail(self, iterator: Any) -> None:
        state = self._state(iterator)
        if state.requested:
            state.requested.popleft()

    def end(self, iterator: Any) -> bool:
        """Return whether the iterator's samples were trained on."""
        state = self._state(iterator)
        has_trained = state.trains
        self._untrained.discard(state)
        state.requested.clear()
        state.trains, state.held = False, 0
        return has_trained

    def train(self) -> None:
        """Count what was delivered before the backward pass that just ran."""
        self.samples, self._abandoned = self.samples + self._abandoned, 0
        for state in self._untrained:
            self.samples, state.held, state.trains = self.samples + state.held, 0, True
            self.processes = state.processes
        self._untrained.clear()


def first_length(batch: Any) -> int:
    """Return the length of the first tensor in a nested batch; 0 if there is none among its first objects."""
    return next((len(tensor) if tensor.dim() else 1 for tensor in tensors(batch)), 0)


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the first objects of nested lists, tuples, mappings and objects with attributes."""
    import torch

    inner = [iter([batch])]
    for _ in range(MAX_OBJECTS):
        item = next(inner[-1], END)
        if item is END:
            inner.pop()
            if not inner:
                break
        elif isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, Mapping):
            inner.append(iter(item.values()))
        elif isinstance(item, (list, tuple)):
            inner.append(iter(item))
        elif not callable(item):
            inner.append(iter(list(getattr(item, "__dict__", {}).values())))
