"""Which samples the loaders of this worker deliver, for the records of `lockstep.script_check.recorder`.

A record is of one pass of a DataLoader. A pass is an evaluation if no backward pass runs while it delivers batches. The
record of an evaluation is sent when training goes on, with the number of calls since then that exchange results.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.diagnosis.loaded_samples import first_length
from lockstep.diagnosis.torch_hooks import TorchHooks
from lockstep.script_check import fingerprints

if TYPE_CHECKING:
    import torch

MAX_INDICES = 200_000  # of one pass in a record


@dataclass(eq=False)
class Pass:
    """One pass of a DataLoader's iterator over its data."""

    about: dict[str, Any]
    indices: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # of each batch
    requested: deque[list[int] | None] = field(default_factory=deque)
    trains: bool = False  # a backward pass has run since its first batch
    exchanges: int = 0  # of this worker before its first batch


class PassRecorder(TorchHooks):
    """Sends a record of each pass of a loader.

    Args:
        rank: This worker's.
        send: Receives each record.

    Attributes:
        exchanges: Calls that exchange tensors with other workers, so far.
        epochs: Complete passes that trained.
        last_optimizer: The number of the optimizer that took the last step; -1 before the first.
    """

    def __init__(self, rank: int, send: Callable[[dict[str, Any]], None]) -> None:
        self._rank, self._send_record = rank, send
        self.exchanges = self.epochs = 0
        self.last_optimizer = -1
        self._running: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
        self._last: Pass | None = None  # the one that delivered the last batch
        self._evaluated: list[dict[str, Any]] = []  # evaluations whose results may still be exchanged

    def send(self, event: str, **content: Any) -> None:
        """Send a record of this worker."""
        self._send_record({"rank": self._rank, "event": event, **content})

    def loader_is_reset(self, iterator: Any) -> None:
        from torch.utils.data import RandomSampler

        self._end(iterator, is_complete=False)
        chosen, data = getattr(iterator, "_index_sampler", None), getattr(iterator, "_dataset", None)
        sampler = getattr(chosen, "sampler", chosen)  # of a sampler of batches, that of samples
        about = {
            "line": fingerprints.line_of_script(),
            "length": _length(data),
            "data": fingerprints.of_data(data),
            "shuffles": bool(getattr(sampler, "shuffle", isinstance(sampler, RandomSampler))),
            "has_set_epoch": hasattr(sampler, "set_epoch"),
            "splits": hasattr(sampler, "num_replicas"),
        }
        self._running[iterator] = Pass(about)

    def batch_is_requested(self, iterator: Any, indices: Sequence[Any] | None) -> None:
        if iterator not in self._running:
            self.loader_is_reset(iterator)
        known = [index for index in indices if isinstance(index, int)] if isinstance(indices, (list, tuple)) else []
        self._running[iterator].requested.append(known if indices and len(known) == len(indices) else None)

    def batch_arrives(self, iterator: Any, batch: Any, has_gradients: bool) -> None:
        current = self._running.get(iterator)
        if current is None:
            return
        if not current.sizes:
            current.exchanges = self.exchanges
        self._last = current
        indices = current.requested.popleft() if current.requested else None
        current.sizes.append(first_length(batch) if indices is None else len(indices))
        if len(current.indices) < MAX_INDICES:
            current.indices += indices or []

    def batch_fails(self, iterator: Any) -> None:
        current = self._running.get(iterator)
        if current and current.requested:
            current.requested.popleft()

    def loader_ends(self, iterator: Any) -> None:
        self._end(iterator, is_complete=True)

    def _end(self, iterator: Any, is_complete: bool) -> None:
        current = self._running.pop(iterator, None)
        if current is None or not current.sizes:
            return
        content = {
            **current.about,
            "optimizer": self.last_optimizer,
            "indices": current.indices,
            "sizes": current.sizes,
            "is_complete": is_complete and len(current.indices) < MAX_INDICES,
            "is_evaluation": not current.trains,
            "exchanges": current.exchanges,
        }
        if not current.trains:
            self._evaluated.append(content)
            return
        self.send("epoch", **content)
        self.epochs += is_complete

    def backward_begins(self, loss: torch.Tensor | None) -> None:
        if self._last is not None:
            self._last.trains = True
        self._send_evaluated()

    def results_are_exchanged(self) -> None:
        self.exchanges += 1

    def _send_evaluated(self) -> None:
        for content in self._evaluated:
            self.send("epoch", **{**content, "exchanges": self.exchanges - content["exchanges"]})
        self._evaluated.clear()

    def finish(self) -> None:
        for iterator in list(self._running):
            self._end(iterator, is_complete=False)
        self._send_evaluated()


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except Exception:  # an iterable data set
        return None
