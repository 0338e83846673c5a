"""Read a data set's samples with the global generators seeded, in any process.

Those of a map-style data set are read one by one, with a seed for each. An iterable data set, seeded once in an epoch,
is read whole by each process, which drops the samples of others.

Seeding the generators of Python and NumPy takes longer than reading a small tensor. They are seeded before each sample
only in a process where samples have drawn from them. Until then, they start each batch in a known state; if a batch
leaves them in another one, it is read again. torch's generator is seeded before each sample, because a data set may
derive seeds of its own from `torch.initial_seed()`, which changes no state. What cannot draw is not seeded: the samples
of a TensorDataset, which are read at once, and torch's own collate function.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from lockstep.data.loader_processes import begin_loader
from lockstep.errors import DataError
from lockstep.models.nested import leaves

PLAIN = (torch.Tensor, torch.strided, True)  # the type, the layout, and whether it is contiguous
CHECKED = 4  # items of an iterable data set, which are read twice
IDLE_SEED = 0x6C6F636B  # of generators that no sample has drawn from; not one that samples set themselves
IDLE_DRAWS = random.Random(IDLE_SEED).getrandbits(64), np.random.RandomState(IDLE_SEED).random_sample()


@dataclass(frozen=True)
class Request:
    """What a loader process needs to make a batch.

    Args:
        epoch: The epoch of the samples.
        epoch_seed: For all items of an iterable data set.
        seeds: For each sample.
        collate_seed: For the collate function.
        checks: How many samples to read again, to see if they are the same; of an iterable data set: whether.
    """

    epoch: int
    epoch_seed: int
    samples: list[int]
    seeds: list[int]
    collate_seed: int
    checks: int


class SeededSet(Dataset[Any]):
    """Makes batches of a data set's samples, each read after the global generators were seeded for it."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed_sample: Callable[[int], object] | None):
        self.dataset, self._collate, self._seed_sample = dataset, collate, seed_sample
        self._may_draw = seed_sample is not None or not _is_of_tensors(dataset)
        self._uses_python = self._uses_numpy = self._has_read = False  # in this process

    def __getitems__(self, request: Request) -> tuple[bool, Any]:
        """Return whether a sample, or a process's first batch, differed when made again, and the batch."""
        is_plain = not self._may_draw and self._collate is default_collate
        if is_plain and (rows := _rows(self.dataset, request.samples)):
            return False, rows
        reads = list(zip(request.samples, request.seeds, strict=True))
        alone = 0 if self._has_read else 1  # where each sample draws, only the first one is read again
        self._has_read, differs = True, False
        if self._may_draw:
            items = self._read_all(reads[:alone]) + self._read_all(reads[alone:])
            again = (number % len(items) for number in range(request.checks))
            differs = any(not _same(items[number], self._read(*reads[number])) for number in again)
        else:
            items = [self.dataset[sample] for sample in request.samples]
        batch = _collated(self._collate, items, request)
        if alone and request.checks and self._collate is not default_collate:
            differs |= not _same(batch, _collated(self._collate, self._read_all(reads), request))
        return differs, batch

    def _read_all(self, reads: list[tuple[int, int]]) -> list[Any]:
        """Return the samples, read again if one has drawn from a generator that was not seeded."""
        items: list[Any] = []
        is_unseeded = bool(reads)
        while is_unseeded:
            if not self._uses_python:
                random.seed(IDLE_SEED)
            if not self._uses_numpy:
                np.random.seed(IDLE_SEED)
            items = [self._read(*each) for each in reads]
            is_unseeded = self._has_new_use()
        return items

    def _read(self, sample: int, seed: int) -> Any:
        torch.default_generator.manual_seed(seed)
        if self._uses_python:
            random.seed(seed)
        if self._uses_numpy:
            np.random.seed(seed & 0xFFFFFFFF)
        if self._seed_sample is not None:
            self._seed_sample(seed)
        return self.dataset[sample]

    def _has_new_use(self) -> bool:
        """Return True if samples have drawn from a generator that was not seeded; it is seeded from now on."""
        python = not self._uses_python and random.getrandbits(64) != IDLE_DRAWS[0]
        numpy = not self._uses_numpy and np.random.random_sample() != IDLE_DRAWS[1]
        self._uses_python, self._uses_numpy = self._uses_python or python, self._uses_numpy or numpy
        return python or numpy


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
        has_length: bool,
    ):
        self.dataset, self._collate, self._seed_sample = dataset, collate, seed_sample
        self._length, self._has_length = length, has_length
        self._items: Iterator[Any] = iter(())
        self._epoch, self._next = -1, 0
        self._states = generator_states()

    def __getitems__(self, request: Request) -> tuple[str, Any]:
        """Return a digest of the epoch's first items if the request checks them, and the batch."""
        digest = self._check(request) if request.checks else ""
        if request.epoch != self._epoch or request.samples[0] < self._next:
            self._start(request)
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
        return digest, _collated(self._collate, items, request)

    def _check(self, request: Request) -> str:
        """Return a digest of the first items of an epoch.

        Raises:
            DataError: They differ when they are read again.
        """
        digests, iterators = set[str](), list[Iterator[Any]]()
        for _ in range(2):
            self._start(request)
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

    def _start(self, request: Request) -> None:
        seed_generators(request.epoch_seed)
        if self._seed_sample is not None:
            self._seed_sample(request.epoch_seed)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(request.epoch)
        self._items, self._epoch, self._next = iter(self.dataset), request.epoch, 0

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


def _is_of_tensors(dataset: Any) -> bool:
    """Return whether samples are slices of tensors, and so draw nothing: of a TensorDataset, or of subsets of one."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


def _rows(dataset: Any, samples: list[int]) -> list[torch.Tensor] | None:
    """Return what `default_collate` makes of samples of a TensorDataset, read at once; None if it might differ."""
    while type(dataset) is Subset:
        samples, dataset = [dataset.indices[sample] for sample in samples], dataset.dataset
    kinds = {(type(each), each.layout, each.is_contiguous()) for each in dataset.tensors}
    if kinds != {PLAIN} or min(samples) < 0 or max(samples) >= len(dataset):
        return None
    numbers = torch.tensor(samples, device="cpu")
    return [each.index_select(0, numbers.to(each.device)) for each in dataset.tensors]


def _collated(collate: Callable[[list[Any]], Any], items: list[Any], request: Request) -> Any:
    if collate is not default_collate:
        seed_generators(request.collate_seed)
    return collate(items)


def begin_with(worker_init_fn: Callable[[int], None], dataset: Any, worker: int) -> None:
    """Called in a new loader process: let it run until its parent ends it, and call the user's `worker_init_fn`."""
    begin_loader(worker)
    # Such a function may open files in get_worker_info().dataset, which must be the user's; it is read-only.
    object.__setattr__(get_worker_info(), "dataset", dataset)
    worker_init_fn(worker)


def seed_generators(number: int) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU (9 µs; `torch.manual_seed` takes 120)."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def generator_states() -> tuple[Any, Any, Any]:
    """Return the states of the global generators of torch on the CPU, Python and NumPy."""
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def set_generator_states(states: tuple[Any, Any, Any]) -> None:
    """Restore what `generator_states` returned."""
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the state of the global generators after the block."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


def _same(one: Any, other: Any) -> bool:
    """Return whether two samples are equal; True if that cannot be told."""
    try:
        return _are_equal(one, other)
    except Exception:  # a user's class, an array of strings, a sparse tensor
        return True


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        return bool((one != one).any()) or torch.equal(one, other)  # NaN differs from itself
    if isinstance(one, Mapping):
        return all(_are_equal(value, other.get(key)) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_are_equal(*pair) for pair in zip(one, other, strict=True))
    own_comparison: Any = type(one).__eq__
    return own_comparison is object.__eq__ or bool(one == other)


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
