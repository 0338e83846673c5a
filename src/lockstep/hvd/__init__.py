"""Horovod's API for PyTorch (`import horovod.torch as hvd`) on torch.distributed.

Behavior as documented at https://horovod.readthedocs.io; docs/reference/horovod.md lists every name and what differs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.hvd.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from lockstep.hvd.compression import Compression
from lockstep.hvd.engine.request import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.ops.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from lockstep.hvd.ops.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from lockstep.hvd.ops.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from lockstep.hvd.ops.rows import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from lockstep.hvd.ops.submission import barrier, join, poll, synchronize
from lockstep.hvd.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

if TYPE_CHECKING:
    from lockstep.hvd import elastic as elastic
    from lockstep.hvd.optimizer.distributed import DistributedOptimizer as DistributedOptimizer
    from lockstep.hvd.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT

_HOMES = {
    "DistributedOptimizer": "lockstep.hvd.optimizer.distributed",
    "SyncBatchNorm": "lockstep.hvd.sync_batch_norm",
}
# No modules: horovod.torch re-exports these names and has its own modules.
__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    """Import on first use what a script may not need."""
    if name == "elastic":
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
