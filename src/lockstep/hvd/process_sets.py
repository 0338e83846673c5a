"""Process sets: subsets of the workers that run collectives among themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.errors import WorldError
from lockstep.hvd.engine import context as engine
from lockstep.hvd.engine.context import Context
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.exceptions import HorovodInternalError


class ProcessSet:
    """A subset of the workers.

    Args:
        ranks_or_comm: Their global ranks, or an mpi4py communicator of them.

    Attributes:
        process_set_id: The id of a registered set, otherwise None.
        ranks: The global ranks, sorted.
        mpi_comm: The communicator passed to the constructor, if any.

    Raises:
        ValueError: The ranks are not integers.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm = ranks_or_comm if hasattr(ranks_or_comm, "allgather") else None
        self.ranks: list[int] | None = None
        if self.mpi_comm is None:
            try:
                ranks = list(ranks_or_comm)
            except TypeError:
                raise ValueError(f"ProcessSet expects ranks or an mpi4py communicator, got {ranks_or_comm!r}") from None
            if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks):
                raise ValueError(f"ProcessSet should be initialized with a list of process ranks, got {ranks!r}")
            self.ranks = sorted(set(ranks))

    def size(self) -> int | None:
        """Return the number of workers in the set; None before registration."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this worker's rank within the set; None before registration.

        Raises:
            ValueError: This worker is not in the set.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        own = engine.get().rank_info.rank
        if own not in self.ranks:
            raise ValueError(f"Rank {own} is not a member of the process set {self.ranks}.")
        return self.ranks.index(own)

    def included(self) -> bool | None:
        """Return whether this worker is in the set; None before registration."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return engine.get().rank_info.rank in self.ranks

    def __reduce__(self) -> tuple[Callable[..., ProcessSet], tuple[Any, ...]]:
        """Let a copy of a registered set be the set itself, which is one on all workers."""
        return (ProcessSet, (self.ranks,)) if self.process_set_id is None else (_registered_as, (self.process_set_id,))

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0
_registered: dict[int, ProcessSet] = {}
_numbers = itertools.count(1)


def _registered_as(number: int) -> ProcessSet:
    if number and number not in _registered:
        raise ValueError(f"process set {number} is not registered in this process")
    return _registered[number] if number else global_process_set


def begin(context: Context, wanted: Sequence[ProcessSet]) -> None:
    """Register the global set and the sets passed to `init`."""
    global _numbers
    _registered.clear()
    _numbers = itertools.count(1)
    global_process_set.ranks = list(range(context.rank_info.size))
    _registered[0] = global_process_set
    for process_set in wanted:
        _register(context, process_set)


def end() -> None:
    """Unregister all sets."""
    for process_set in _registered.values():
        if process_set is not global_process_set:
            process_set.process_set_id = None
    _registered.clear()


def _register(context: Context, process_set: ProcessSet) -> None:
    """Compare the ranks on all workers, check them, and connect the set.

    Raises:
        ValueError: The set is a duplicate, is empty, or contains invalid ranks.
        HorovodInternalError: The workers passed different ranks, or some cannot connect.
    """
    if process_set.mpi_comm is not None:
        process_set.ranks = sorted(process_set.mpi_comm.allgather(context.rank_info.rank))
    ranks = process_set.ranks
    size = context.rank_info.size
    number = next(_numbers)  # also if registration fails, so that workers keep the same ids
    _agree(context, f"process set {number}", f"ranks {ranks}")  # before the checks, so that all workers raise or none
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"invalid process set ranks {ranks}: expected one or more ranks from 0 to {size - 1}")
    if any(other.ranks == ranks for other in _registered.values()):
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    try:
        context.open_channel(number, ranks)
        outcome = "connected"
    except WorldError as error:
        outcome = f"not connected: {error}"
    try:
        _agree(context, f"connection of process set {number}", outcome)
    except HorovodInternalError:
        context.close_channel(number, "The process set could not be connected.")
        raise
    process_set.process_set_id = number
    _registered[number] = process_set


class Agreement(Collective, kind="agreement"):
    """Compares a value across all workers; fails if it differs."""

    @classmethod
    def difference(cls, terms: Sequence[Any], others: Sequence[Any]) -> str:
        (name, mine), (_, theirs) = terms, others
        return f"{name}: One rank has {mine}, but another rank has {theirs}." if mine != theirs else ""


def _agree(context: Context, name: str, value: str) -> None:
    context.channels[0].submit(Agreement(name, terms=(name, value), urgent=True)).wait()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. All workers must call it, including those outside the set.

    Raises:
        ValueError: HOROVOD_DYNAMIC_PROCESS_SETS=1 was not set before `init`, or the set is a duplicate or invalid.
        HorovodInternalError: The workers passed different sets.
    """
    context = engine.get(connected=True)
    if not context.settings.dynamic_process_sets:
        raise ValueError(
            "Process sets can only be added after hvd.init() with HOROVOD_DYNAMIC_PROCESS_SETS=1 or "
            'hvd.init(process_sets="dynamic").'
        )
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _register(context, new)
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set. All workers must call it, including those outside the set.

    Returns:
        False for the global set and for sets that are not registered.

    Raises:
        ValueError: HOROVOD_DYNAMIC_PROCESS_SETS=1 was not set before `init`.
        HorovodInternalError: The workers passed different sets.
    """
    context = engine.get(connected=True)
    number = process_set.process_set_id
    if not number or _registered.get(number) is not process_set:
        return False
    if not context.settings.dynamic_process_sets:
        raise ValueError("Process sets can only be removed with HOROVOD_DYNAMIC_PROCESS_SETS=1.")
    _agree(context, f"removal of process set {number}", f"ranks {process_set.ranks}")
    context.close_channel(number, f"The process set {process_set.ranks} has been removed.")
    process_set.process_set_id = None
    del _registered[number]
    return True


def process_set_ids() -> list[int]:
    """Return the ids of all registered sets."""
    return sorted(_registered)
