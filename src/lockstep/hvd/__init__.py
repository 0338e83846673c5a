"""Horovod's API for PyTorch (`import horovod.torch as hvd`) on torch.distributed.

Behavior as documented at https://horovod.readthedocs.io; docs/reference/horovod.md lists every name and what differs.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.hvd.basics import ccl_built as ccl_built
from lockstep.hvd.basics import cross_rank as cross_rank
from lockstep.hvd.basics import cross_size as cross_size
from lockstep.hvd.basics import cuda_built as cuda_built
from lockstep.hvd.basics import ddl_built as ddl_built
from lockstep.hvd.basics import gloo_built as gloo_built
from lockstep.hvd.basics import gloo_enabled as gloo_enabled
from lockstep.hvd.basics import init as init
from lockstep.hvd.basics import is_initialized as is_initialized
from lockstep.hvd.basics import local_rank as local_rank
from lockstep.hvd.basics import local_size as local_size
from lockstep.hvd.basics import mpi_built as mpi_built
from lockstep.hvd.basics import mpi_enabled as mpi_enabled
from lockstep.hvd.basics import mpi_threads_supported as mpi_threads_supported
from lockstep.hvd.basics import nccl_built as nccl_built
from lockstep.hvd.basics import rank as rank
from lockstep.hvd.basics import rocm_built as rocm_built
from lockstep.hvd.basics import shutdown as shutdown
from lockstep.hvd.basics import size as size
from lockstep.hvd.basics import start_timeline as start_timeline
from lockstep.hvd.basics import stop_timeline as stop_timeline
from lockstep.hvd.compression import Compression as Compression
from lockstep.hvd.engine import request
from lockstep.hvd.exceptions import HorovodInternalError as HorovodInternalError
from lockstep.hvd.ops.allreduce import allreduce as allreduce
from lockstep.hvd.ops.allreduce import allreduce_ as allreduce_
from lockstep.hvd.ops.allreduce import allreduce_async as allreduce_async
from lockstep.hvd.ops.allreduce import allreduce_async_ as allreduce_async_
from lockstep.hvd.ops.allreduce import grouped_allreduce as grouped_allreduce
from lockstep.hvd.ops.allreduce import grouped_allreduce_ as grouped_allreduce_
from lockstep.hvd.ops.allreduce import grouped_allreduce_async as grouped_allreduce_async
from lockstep.hvd.ops.allreduce import grouped_allreduce_async_ as grouped_allreduce_async_
from lockstep.hvd.ops.broadcast import broadcast as broadcast
from lockstep.hvd.ops.broadcast import broadcast_ as broadcast_
from lockstep.hvd.ops.broadcast import broadcast_async as broadcast_async
from lockstep.hvd.ops.broadcast import broadcast_async_ as broadcast_async_
from lockstep.hvd.ops.functions import allgather_object as allgather_object
from lockstep.hvd.ops.functions import broadcast_object as broadcast_object
from lockstep.hvd.ops.functions import broadcast_optimizer_state as broadcast_optimizer_state
from lockstep.hvd.ops.functions import broadcast_parameters as broadcast_parameters
from lockstep.hvd.ops.rows import allgather as allgather
from lockstep.hvd.ops.rows import allgather_async as allgather_async
from lockstep.hvd.ops.rows import alltoall as alltoall
from lockstep.hvd.ops.rows import alltoall_async as alltoall_async
from lockstep.hvd.ops.rows import grouped_allgather as grouped_allgather
from lockstep.hvd.ops.rows import grouped_allgather_async as grouped_allgather_async
from lockstep.hvd.ops.rows import grouped_reducescatter as grouped_reducescatter
from lockstep.hvd.ops.rows import grouped_reducescatter_async as grouped_reducescatter_async
from lockstep.hvd.ops.rows import reducescatter as reducescatter
from lockstep.hvd.ops.rows import reducescatter_async as reducescatter_async
from lockstep.hvd.ops.rows import sparse_allreduce_async as sparse_allreduce_async
from lockstep.hvd.ops.submission import barrier as barrier
from lockstep.hvd.ops.submission import join as join
from lockstep.hvd.ops.submission import poll as poll
from lockstep.hvd.ops.submission import synchronize as synchronize
from lockstep.hvd.process_sets import ProcessSet as ProcessSet
from lockstep.hvd.process_sets import add_process_set as add_process_set
from lockstep.hvd.process_sets import global_process_set as global_process_set
from lockstep.hvd.process_sets import remove_process_set as remove_process_set

if TYPE_CHECKING:
    from lockstep.hvd import elastic as elastic
    from lockstep.hvd.optimizer.distributed import DistributedOptimizer as DistributedOptimizer
    from lockstep.hvd.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

Average, Sum, Adasum = request.AVERAGE, request.SUM, request.ADASUM
Min, Max, Product = request.MIN, request.MAX, request.PRODUCT

_HOMES = {
    "DistributedOptimizer": "lockstep.hvd.optimizer.distributed",
    "SyncBatchNorm": "lockstep.hvd.sync_batch_norm",
}
# No modules: horovod.torch re-exports these names and has its own modules.
__all__ = sorted(
    {name for name, value in list(globals().items()) if not (name.startswith("_") or isinstance(value, ModuleType))}
    - {"Any", "ModuleType", "TYPE_CHECKING", "import_module"}
    | _HOMES.keys()
)


def __getattr__(name: str) -> Any:
    """Import on first use what a script may not need."""
    if name == "elastic":
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
