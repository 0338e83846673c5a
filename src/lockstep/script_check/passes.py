"""Which samples the loaders of this worker deliver, for the records of `lockstep.script_check.recorder`.

A record is of one pass of a DataLoader. A pass is an evaluation if no backward pass runs with its batches. The
record of an evaluation is sent when training goes on, with the number of calls since then that exchange results.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.diagnosis.loaded_samples import first_length, tensors
from lockstep.diagnosis.torch_hooks import TorchHooks
from lockstep.script_check import fingerprints

if TYPE_CHECKING:
    import torch

MAX_INDICES = 200_000  # of one pass in a record
MAX_CONTENTS = 1000  # samples of loader processes that are compared with those of a later pass


@dataclass(eq=False)
class Pass:
    """One pass of a DataLoader's iterator over its data."""

    record: dict[str, Any]
    requested: deque[list[int] | None] = field(default_factory=deque)
    first: list[list[str]] = field(default_factory=list)  # samples of iterable data, by loader process
    states: dict[str, str] = field(default_factory=dict)  # of generators of random numbers, before a batch is read
    is_beside: bool = False  # a backward pass has run between its first and last batch
    trains: bool = False  # a backward pass has run since its first batch
    exchanges: int = 0  # of this worker before its first batch
    files: int = 0  # that it opened to write into, before that
    calls: int = 0  # of models before its last batch

    @property
    def has_begun(self) -> bool:
        return bool(self.record["sizes"])


class PassRecorder(TorchHooks):
    """Sends a record of each pass of a loader.

    Args:
        rank: This worker's.
        send: Receives each record.

    Attributes:
        exchanges: Calls that exchange tensors with other workers, so far.
        results: Those that may exchange results: outside of the calls of sharded models.
        files: Files that were opened to write into.
        epochs: Complete passes that trained.
        calls: Calls of models so far.
        last_optimizer: The number of the optimizer that took the last step; -1 before the first.
    """

    def __init__(self, rank: int, send: Callable[[dict[str, Any]], None]) -> None:
        self._rank, self._send_record = rank, send
        self.exchanges = self.results = self.files = self.epochs = self.calls = 0
        self.last_optimizer, self._is_in_shards = -1, False
        self._running: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
        self._last: Pass | None = None  # the one that delivered the last batch
        # Without a backward pass yet: evaluations whose results may still be exchanged, and batches read ahead.
        self._ended: list[Pass] = []
        self._contents: dict[tuple[Any, ...], str] = {}  # of samples of loader processes

    def send(self, event: str, **content: Any) -> None:
        """Send a record of this worker."""
        self._send_record({"rank": self._rank, "event": event, **content})

    def loader_is_reset(self, iterator: Any) -> None:
        from torch.utils.data import DistributedSampler, RandomSampler

        self._end(iterator, is_complete=False)
        chosen, data = getattr(iterator, "_index_sampler", None), getattr(iterator, "_dataset", None)
        inner: Any = getattr(chosen, "batch_sampler", chosen)  # of a sampler around another one, such as Accelerate's
        sampler = getattr(inner, "sampler", inner)  # of a sampler of batches, that of samples
        parts = getattr(sampler, "num_replicas", None)
        record: dict[str, Any] = {
            "line": fingerprints.line_of_script(),
            "cycles": fingerprints.is_cycling(),
            "length": _length(data),
            "data": fingerprints.of_data(data),
            "classes": fingerprints.of_classes(data),
            "items": fingerprints.of_data(data, in_order=False) if parts else "",
            "shuffles": bool(getattr(sampler, "shuffle", isinstance(sampler, RandomSampler))),
            "has_set_epoch": hasattr(sampler, "set_epoch"),
            "parts": parts,
            "part": _length(sampler) if parts and inner is not chosen else None,
            "order": isinstance(sampler, DistributedSampler) and sampler.shuffle and str(sampler.seed),
            "drawn_for": getattr(sampler, "epoch", None),
            "repeats": False,  # whether all processes of the loader deliver the same samples
            "indices": [],
            "sizes": [],  # of each batch
            "draws": {},  # states of generators of random numbers that the data set draws from
        }
        self._running[iterator] = Pass(record)

    def batch_is_requested(self, iterator: Any, indices: Sequence[Any] | None) -> None:
        if iterator not in self._running:
            self.loader_is_reset(iterator)
        known = [index for index in indices if isinstance(index, int)] if isinstance(indices, (list, tuple)) else []
        current = self._running[iterator]
        current.requested.append(known if indices and len(known) == len(indices) else None)
        if not _seed(iterator) and not current.record["draws"]:
            current.states = fingerprints.of_random_states()

    def batch_arrives(self, iterator: Any, batch: Any, has_gradients: bool) -> None:
        from torch.utils.data import IterableDataset

        current = self._running.get(iterator)
        if current is None:
            return
        if not current.has_begun:
            current.exchanges, current.files = self.results, self.files
        self._last, current.calls, record = current, self.calls, current.record
        indices = current.requested.popleft() if current.requested else None
        record["sizes"].append(first_length(batch) if indices is None else len(indices))
        processes = getattr(iterator, "_num_workers", 0)
        if 1 < processes > len(current.first) and isinstance(iterator._dataset, IterableDataset):
            current.first.append(fingerprints.of_samples(batch))
            one = current.first[0]
            record["repeats"] = len(set(one)) > 1 and current.first == [one] * processes
        record["draws"] = record["draws"] or self._draws(current, _seed(iterator), batch, indices)
        if len(record["indices"]) < MAX_INDICES:
            record["indices"] += indices or []

    def _draws(self, current: Pass, seed: str, batch: Any, indices: list[int] | None) -> dict[str, str]:
        """Return the states from which the data set drew random numbers to read a batch, as far as can be seen."""
        if not seed:
            now = fingerprints.of_random_states()
            return {name: state for name, state in current.states.items() if now[name] != state}
        shapes = str([tensor.shape[1:] for tensor in tensors(batch)])
        for index, content in zip(indices or [], fingerprints.of_samples(batch, len(indices or [])), strict=False):
            key = (current.record["data"], index, shapes)
            if self._contents.get(key, content) != content:
                return {"seed": seed}
            if len(self._contents) < MAX_CONTENTS:
                self._contents[key] = content
        return {}

    def batch_fails(self, iterator: Any) -> None:
        current = self._running.get(iterator)
        if current and current.requested:
            current.requested.popleft()

    def loader_ends(self, iterator: Any) -> None:
        self._end(iterator, is_complete=True)

    def _end(self, iterator: Any, is_complete: bool) -> None:
        current = self._running.pop(iterator, None)
        if current is self._last and current and self.calls > current.calls:
            self._last = None  # else its last batch was read ahead, and is still to be used
        if current is None or not current.has_begun or (current.is_beside and not current.trains):
            return  # the second loader of a step, of which only the last one that delivers a batch is known to train
        current.record["optimizer"] = self.last_optimizer
        current.record["is_complete"] = is_complete and len(current.record["indices"]) < MAX_INDICES
        self._ended.append(current)
        if current.trains:
            self._send_ended(-1)

    def backward_begins(self, loss: torch.Tensor | None) -> None:
        for current in self._running.values():
            current.is_beside |= current.has_begun
        if self._last is not None:
            self._last.trains = True
        self._send_ended()

    def results_are_exchanged(self, *_: Any, **__: Any) -> None:
        self.exchanges += 1
        self.results += not self._is_in_shards

    def _send_ended(self, first: int = 0) -> None:
        """Send the records of the passes from `first` on."""
        for each in self._ended[first:]:
            exchanges = self.results - each.exchanges + ("mpi4py" in sys.modules)  # read of evaluations only
            self.send(
                "epoch",
                **each.record,
                is_evaluation=not each.trains,
                exchanges=exchanges,
                files=self.files - each.files,
            )
            self.epochs += each.trains and each.record["is_complete"]
        del self._ended[first:]

    def finish(self) -> None:
        for iterator in list(self._running):
            self._end(iterator, is_complete=False)
        if hasattr(sys, "last_type"):  # an exception ends the program, perhaps before it exchanges these results
            self._ended.clear()
        self._send_ended()


def _seed(iterator: Any) -> str:
    """Return the seed of the iterator's processes; "" if it has none."""
    return str(getattr(iterator, "_base_seed", "")) if getattr(iterator, "_num_workers", 0) else ""


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except Exception:  # an iterable data set
        return None
