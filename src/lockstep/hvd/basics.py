"""The process model: starting and stopping, and who this worker is among its peers."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import WorldError
from lockstep.hvd import process_sets as sets
from lockstep.hvd.engine import current
from lockstep.hvd.engine.context import Context
from lockstep.hvd.engine.settings import Settings
from lockstep.hvd.ops.submission import forget_finished
from lockstep.hvd.process_sets import ProcessSet
from lockstep.world.launcher_environment import Place
from lockstep.world.rendezvous import open_store

GONE_SECONDS = 2.0
_generations = itertools.count()  # of static jobs: how often this process has connected


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect this worker to its peers. Called by all workers; does nothing where it has been called already.

    The place comes from the launcher's variables (horovodrun, torchrun, `lockstep train`, mpirun) or, where the script
    has initialised torch.distributed, from there; without any, the worker is alone.

    Args:
        comm: The global ranks that take part, or an mpi4py communicator with these workers; None for all. Ranks are
            then counted within them.
        process_sets: Sets to register at once, the same on all workers, or "dynamic" to allow `add_process_set`.

    Raises:
        ValueError: The peers cannot be reached, or an argument is wrong.
    """
    if current.context is not None:
        return
    settings = Settings.from_environment()
    if process_sets == "dynamic":
        settings, process_sets = replace(settings, dynamic_process_sets=True), None
    if isinstance(process_sets, str):
        raise ValueError(f'process_sets is a list of ProcessSet or "dynamic", not {process_sets!r}')
    wanted = [sets.checked(process_set) for process_set in process_sets or ()]
    _set_log_level()
    while current.context is None:
        try:
            place, store, launched = _meet(comm, settings)
        except WorldError as error:
            raise ValueError(f"Horovod initialization failed: {error}") from error
        context = Context(place, store, settings, launched)
        try:
            context.connect()
            sets.begin(context, wanted)
            if settings.timeline and settings.timeline != "DYNAMIC" and place.rank == 0:
                context.timeline.open(settings.timeline, settings.timeline_mark_cycles)
        except Exception as error:
            broken = context.broken
            context.shut_down()
            sets.end()
            if settings.elastic and broken and _is_gone(store):
                continue  # a worker was lost meanwhile, and is replaced: meet again
            if isinstance(error, (WorldError, RuntimeError)):
                raise ValueError(f"Horovod initialization failed: {error}") from error
            raise
        current.context = context
    atexit.register(shutdown)
    _watch_forks()


def _is_gone(store: Any) -> bool:
    """Whether a generation of an elastic job is over: its store is closed soon after one of its workers has ended."""
    deadline = time.monotonic() + GONE_SECONDS
    while time.monotonic() < deadline:
        try:
            store.check(["here/0"])
        except RuntimeError:
            return True
        time.sleep(0.05)
    return False


@cache
def _watch_forks() -> None:
    """See to it that a forked child, such as a DataLoader's worker, neither keeps the connections nor ends them."""
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    context, current.context = current.context, None
    if context is not None:
        atexit.unregister(shutdown)
        context.abandon()


def _meet(comm: Any, settings: Settings) -> tuple[Place, Any, int]:
    """This worker's place, the job's store under a prefix of this initialisation's own, and the launched workers."""
    if settings.elastic:
        if comm is not None:
            raise ValueError("the workers of an elastic job change, so hvd.init takes no comm in it")
        from lockstep.world.elastic_rendezvous import meet

        meeting = meet()
        return meeting.place, dist.PrefixStore(f"hvd/{meeting.generation}", meeting.store), meeting.place.size
    place = Place.from_environment()
    if dist.is_initialized() and dist.get_world_size() > 1:
        place = replace(place, rank=dist.get_rank(), size=dist.get_world_size())
        base = dist.distributed_c10d._get_default_store()
    else:
        base = open_store(place, settings.start_timeout_seconds) if place.size > 1 else dist.HashStore()
    launched = place.size
    prefix = f"hvd/{next(_generations)}"  # counted also where this worker is not in `comm`
    ranks = _ranks_of(comm, place)
    if ranks is not None and len(ranks) < launched:
        place = replace(place, rank=ranks.index(place.rank), size=len(ranks))
        prefix += f"/{'-'.join(map(str, ranks))}"
    return place, dist.PrefixStore(prefix, base), launched


def _ranks_of(comm: Any, place: Place) -> list[int] | None:
    """The ranks that `comm` stands for, sorted."""
    if comm is None:
        return None
    if hasattr(comm, "allgather"):
        ranks = sorted(comm.allgather(place.rank))
    elif isinstance(comm, (list, tuple)) and all(isinstance(rank, int) for rank in comm):
        ranks = sorted(set(comm)) or list(range(place.size))
    else:
        raise ValueError(f"comm is a list of ranks or an mpi4py communicator, not {comm!r}")
    if place.rank not in ranks or ranks[0] < 0 or ranks[-1] >= place.size:
        raise ValueError(f"comm {ranks} must hold this worker's rank {place.rank} and ranks below {place.size} alone")
    return ranks


def _set_log_level() -> None:
    """HOROVOD_LOG_LEVEL in logging's terms."""
    name = os.environ.get("HOROVOD_LOG_LEVEL", "").upper()
    levels = {"TRACE": logging.DEBUG, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING}
    level = {**levels, "ERROR": logging.ERROR, "FATAL": logging.CRITICAL}.get(name)
    if level is not None:
        logging.getLogger("lockstep.hvd").setLevel(level)


def shutdown() -> None:
    """Disconnect; does nothing where `init` has not been called. Pending operations fail. `init` may follow."""
    context, current.context = current.context, None
    if context is not None:
        atexit.unregister(shutdown)
        context.shut_down()
        sets.end()
        forget_finished()


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` has not."""
    return current.context is not None


def size() -> int:
    """The number of workers.

    Raises:
        ValueError: Before `init`; so do all functions that ask for the place.
    """
    return current.get().place.size


def rank() -> int:
    """This worker's number among all, from 0."""
    return current.get().place.rank


def local_size() -> int:
    """The number of workers on this host."""
    return current.get().place.local_size


def local_rank() -> int:
    """This worker's number on its host, from 0; the number of the GPU to use.

    In an elastic job it is the worker's slot there, which may be `local_size()` or more.
    """
    return current.get().place.local_rank


def cross_size() -> int:
    """The number of hosts that have a worker of this local rank."""
    context = current.get()
    return context.neighbours.cross(context.place.rank)[1]


def cross_rank() -> int:
    """This worker's number among those of its local rank, in order of rank."""
    context = current.get()
    return context.neighbours.cross(context.place.rank)[0]


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of workers."""
    return current.get().neighbours.homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write a Chrome trace; rank 0 does.

    Raises:
        ValueError: Not initialised, the file cannot be written, or HOROVOD_TIMELINE=DYNAMIC was not set before `init`.
    """
    context = current.get()
    if context.settings.timeline != "DYNAMIC":
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC before hvd.init() to start and stop the timeline later.")
    if context.place.rank == 0:
        context.timeline.open(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the trace; does nothing where none is open."""
    current.get().timeline.close()


def gloo_built() -> bool:
    """Whether CPU tensors can be reduced: true, through torch's Gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether Gloo is in use: true."""
    return gloo_built()


def nccl_built() -> int:
    """The version code of torch's NCCL, e.g. 22304 for 2.23.4; 0 without NCCL."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Whether this torch works with CUDA devices."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch works with ROCm devices."""
    return torch.version.hip is not None


def mpi_built() -> bool:
    """Whether MPI carries the data: never; mpirun may start the workers all the same."""
    return False


def mpi_enabled() -> bool:
    """Whether MPI carries the data: never."""
    return False


def mpi_threads_supported() -> bool:
    """Whether mpi4py may be used beside Horovod: where mpirun or its like has started the workers.

    Lockstep itself makes no call to MPI, so any thread may. Elsewhere a warning says what to do.

    Raises:
        ValueError: Before `init`.
    """
    if current.get().place.is_of_mpi:
        return True
    warnings.warn(
        "hvd.mpi_threads_supported() is False, as no MPI has started this worker and mpi4py would find no others; "
        "start the script with mpirun to use both",
        stacklevel=2,
    )
    return False


def ddl_built() -> bool:
    """Whether IBM's DDL carries the data: never."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL carries the data: never."""
    return False
