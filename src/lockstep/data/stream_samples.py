"""Read the samples of an iterable data set by number, in any process: all are read, and those of others dropped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lockstep.data.random_draws import Draws
from lockstep.data.seeded_samples import Request, generator_states, seed_generators, set_generator_states
from lockstep.errors import DataError
from lockstep.models.nested import leaves

CHECKED = 4  # items, which are read twice


class StreamSet(Dataset[Any]):
    """Makes batches of an iterable data set's items, whose numbers are their places in the epoch.

    While items are read, the global generators are the stream's, seeded at the start of each epoch, so that each worker
    and each loader process reads the same items.

    Args:
        has_length: Whether `length` is the data set's own, so that more items are an error.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        seed_sample: Callable[[int], object] | None,
        length: int,
        seed: int,
        has_length: bool,
    ):
        self.dataset, self._collate, self._seed_sample = dataset, collate, seed_sample
        self._length, self._seed, self._has_length = length, seed, has_length
        self._items: Iterator[Any] = iter(())
        self._epoch, self._next = -1, 0
        self._states = generator_states()

    def __getitems__(self, request: Request) -> tuple[str, Any]:
        """Return a digest of the epoch's first items if the request checks them, and the batch."""
        digest = self._check(request.epoch) if request.checks else ""
        if request.epoch != self._epoch or request.samples[0] < self._next:
            self._start(request.epoch)
        else:
            set_generator_states(self._states)
        items = []
        for place in request.samples:
            while self._next <= place:
                item = self._read()
            items.append(item)
        if self._has_length and self._next == self._length and next(self._items, self) is not self:
            raise DataError(f"{self._name} has more items than its length, {self._length:,}")
        self._states = generator_states()
        seed_generators(request.collate_seed)
        return digest, self._collate(items)

    def _check(self, epoch: int) -> str:
        """Return a digest of the first items of an epoch.

        Raises:
            DataError: They differ when they are read again.
        """
        digests, iterators = set[str](), list[Iterator[Any]]()
        for _ in range(2):
            self._start(epoch)
            iterators.append(self._items)
            digests.add(digest_of([self._read() for _ in range(min(CHECKED, self._length))]))
        self._epoch = -1
        if iterators[0] is iterators[1] or len(digests) > 1:
            raise DataError(
                f"{self._name} did not start again when it was read a second time with the same seeds, so each worker "
                f"would read other items. Pass a data set whose __iter__ starts at the first item, in an order that "
                f"depends only on set_epoch and the global generators of torch, random or numpy.random"
            )
        return digests.pop()

    def _start(self, epoch: int) -> None:
        seed = int(Draws(self._seed, epoch, np.zeros(1, np.int64)).bits("stream")[0])
        seed_generators(seed)
        if self._seed_sample is not None:
            self._seed_sample(seed)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._items, self._epoch, self._next = iter(self.dataset), epoch, 0

    def _read(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:
            raise DataError(
                f"{self._name} ended after {self._next:,} of {self._length:,} items. Each worker and each loader "
                f"process must read all of them: leave out sharding of its own (by rank, or by get_worker_info); or "
                f"correct length="
            ) from None
        self._next += 1
        return item

    @property
    def _name(self) -> str:
        return type(self.dataset).__name__


def digest_of(items: list[Any]) -> str:
    """Return a digest of the tensors, arrays, texts and numbers in some items."""
    digest = hashlib.sha256()
    for each in leaves(items):
        if isinstance(each, torch.Tensor):
            each = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(each, np.ndarray):
            digest.update(each.tobytes())
        elif isinstance(each, bytes | str | int | float):
            digest.update(repr(each).encode())
    return digest.hexdigest()
