"""The process model: initialization, shutdown, ranks and sizes."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lockstep.diagnosis.spawned_workers import refuse_copy
from lockstep.errors import WorldError
from lockstep.hvd import process_sets as sets
from lockstep.hvd.engine import context as engine
from lockstep.hvd.engine.context import Context
from lockstep.hvd.engine.settings import Settings
from lockstep.hvd.ops.submission import forget_finished
from lockstep.hvd.process_sets import ProcessSet
from lockstep.world import generations
from lockstep.world.launcher_environment import RankInfo

# By generation: how many times this process has initialized Horovod in it.
_inits: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect this worker to its peers. All workers must call it; later calls, also in forked children, do nothing.

    Rank and size come from torch.distributed if the script has initialized it, otherwise from the launcher's
    environment variables (horovodrun, torchrun, `lockstep train`, mpirun). Without either, the job has one worker.

    Args:
        comm: The global ranks that take part, or an mpi4py communicator of these workers; None for all. Ranks are
            then renumbered from 0 within this subset.
        process_sets: Process sets to register, the same on all workers, or "dynamic" to allow `add_process_set`.

    Raises:
        ValueError: The peers cannot be reached, or an argument is invalid.
        ConfigError: A process that a worker has started, such as a loader process, runs the script again.
    """
    former = engine.current
    if former is not None and not (former.is_inherited and former.rank_info.size == 1):
        return
    settings = Settings.from_environment()
    if process_sets == "dynamic":
        settings, process_sets = replace(settings, dynamic_process_sets=True), None
    if isinstance(process_sets, str):
        raise ValueError(f'process_sets must be a list of ProcessSet or "dynamic", got {process_sets!r}')
    wanted = list(process_sets or ())
    for process_set in wanted:
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"expected a ProcessSet, got {process_set!r}")
    _set_log_level()
    try:
        rank_info, store, launched = _meet(comm, settings)
    except WorldError as error:
        raise ValueError(f"Horovod initialization failed: {error}") from error
    context = Context(rank_info, store, settings, launched)
    try:
        context.connect()
        sets.begin(context, wanted)
        if settings.timeline and settings.timeline != "DYNAMIC" and rank_info.rank == 0:
            context.timeline.open(settings.timeline, settings.timeline_mark_cycles)
    except Exception as error:
        context.shut_down()
        sets.end()
        if isinstance(error, (WorldError, RuntimeError)):
            raise ValueError(f"Horovod initialization failed: {error}") from error
        raise
    engine.current = context
    atexit.register(shutdown)


def _forget() -> None:
    if engine.current is not None:
        atexit.unregister(shutdown)
        engine.current.abandon()


os.register_at_fork(after_in_child=_forget)  # they keep the rank info, such as DataLoader workers


def _meet(comm: Any, settings: Settings) -> tuple[RankInfo, Any, int]:
    """Return this worker's rank info, the job's store with a prefix for this call, and the launched world size."""
    if comm is not None and os.environ.get("HOROVOD_ELASTIC") == "1":
        raise ValueError("hvd.init() does not accept comm in an elastic job, whose workers change; omit comm")
    from lockstep.world.rendezvous import open_store

    rank_info = RankInfo.from_environment()
    if rank_info.size > 1:
        refuse_copy()
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank_info = replace(rank_info, rank=dist.get_rank(), size=dist.get_world_size())
        base = dist.distributed_c10d._get_default_store()
    else:
        base = open_store(rank_info, settings.start_timeout_seconds) if rank_info.size > 1 else dist.HashStore()
    launched = rank_info.size
    prefix = f"hvd/{next(_inits[rank_info.restart])}"  # also incremented on workers outside `comm`
    ranks = _ranks_of(comm, rank_info)
    if ranks is not None and len(ranks) < launched:
        rank_info = replace(rank_info, rank=ranks.index(rank_info.rank), size=len(ranks))
        prefix += f"/{'-'.join(map(str, ranks))}"
    return rank_info, dist.PrefixStore(prefix, base), launched


def _ranks_of(comm: Any, rank_info: RankInfo) -> list[int] | None:
    """Return the global ranks in `comm`, sorted; None for all."""
    if comm is None:
        return None
    if hasattr(comm, "allgather"):
        ranks = sorted(comm.allgather(rank_info.rank))
    elif isinstance(comm, (list, tuple)) and all(isinstance(rank, int) for rank in comm):
        ranks = sorted(set(comm)) or list(range(rank_info.size))
    else:
        raise ValueError(f"comm must be a list of ranks or an mpi4py communicator, got {comm!r}")
    if rank_info.rank not in ranks or ranks[0] < 0 or ranks[-1] >= rank_info.size:
        raise ValueError(
            f"comm {ranks} must contain this worker's rank {rank_info.rank} and only ranks below {rank_info.size}"
        )
    return ranks


def _set_log_level() -> None:
    """Apply HOROVOD_LOG_LEVEL to the logger "lockstep.hvd"."""
    name = os.environ.get("HOROVOD_LOG_LEVEL", "").upper()
    level = {"TRACE": logging.DEBUG, **logging.getLevelNamesMapping()}.get(name)
    if level is not None:
        logging.getLogger("lockstep.hvd").setLevel(level)


def shutdown() -> None:
    """Disconnect this worker, after which `init` can be called again. Pending operations fail."""
    context, engine.current = engine.current, None
    if context is not None:
        atexit.unregister(shutdown)
        context.shut_down()
        sets.end()
        forget_finished()


generations.on_loss.append(lambda error: shutdown())


def is_initialized() -> bool:
    """Return whether `init` has been called, without a later `shutdown`."""
    return engine.current is not None


def size() -> int:
    """Return the number of workers.

    Raises:
        ValueError: `init` has not been called. All functions for ranks and sizes raise this.
    """
    return engine.get().rank_info.size


def rank() -> int:
    """Return this worker's global rank, from 0."""
    return engine.get().rank_info.rank


def local_size() -> int:
    """Return the number of workers on this host."""
    return engine.get().rank_info.local_size


def local_rank() -> int:
    """Return this worker's index on its host, from 0: the index of the GPU to use.

    In an elastic job it is the worker's slot on the host, which can be `local_size()` or more.
    """
    return engine.get().rank_info.local_rank


def cross_size() -> int:
    """Return the number of hosts with a worker of this local rank."""
    local_ranks = engine.get().local_ranks
    return local_ranks.count(local_ranks[rank()])


def cross_rank() -> int:
    """Return this worker's index among the workers with the same local rank, in order of rank."""
    local_ranks = engine.get().local_ranks
    return local_ranks[: rank()].count(local_ranks[rank()])


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of workers."""
    return len(set(engine.get().local_sizes)) == 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start writing a Chrome trace to `file_path`, on rank 0.

    Raises:
        ValueError: `init` has not been called, HOROVOD_TIMELINE=DYNAMIC was not set before it, or the file cannot be
            written.
    """
    context = engine.get(connected=True)
    if context.settings.timeline != "DYNAMIC":
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC before hvd.init() to start and stop the timeline later.")
    if context.rank_info.rank == 0:
        context.timeline.open(file_path, mark_cycles)


def stop_timeline() -> None:
    """Close the trace, if one is open."""
    engine.get().timeline.close()


def gloo_built() -> bool:
    """Return whether this torch has Gloo, which reduces CPU tensors."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Return `gloo_built()`."""
    return gloo_built()


def nccl_built() -> int:
    """Return the version code of torch's NCCL, such as 22304 for 2.23.4; 0 without NCCL."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Return whether this torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether this torch was built with ROCm."""
    return torch.version.hip is not None


def mpi_built() -> bool:
    """Return False: tensors are never sent over MPI, even if mpirun starts the workers."""
    return False


def mpi_enabled() -> bool:
    """Return False: tensors are never sent over MPI."""
    return False


def mpi_threads_supported() -> bool:
    """Return whether the script can use mpi4py: only if mpirun or a similar launcher started the workers.

    Lockstep itself never calls MPI, so any thread may. Warns if the result is False.

    Raises:
        ValueError: `init` has not been called.
    """
    if engine.get().rank_info.is_of_mpi:
        return True
    warnings.warn(
        "hvd.mpi_threads_supported() is False: this worker was not started by MPI, so mpi4py would see only one "
        "process; to use mpi4py, start the script with mpirun",
        stacklevel=2,
    )
    return False


def ddl_built() -> bool:
    """Return False: IBM's DDL is never used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is never used."""
    return False
