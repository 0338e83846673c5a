"""The operations under Horovod's module name; implemented by `lockstep.hvd`."""

from typing import Any

from horovod.common.util import (  # noqa: F401
    check_installed_version,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)
from lockstep import hvd
from lockstep.hvd import *  # noqa: F403
from lockstep.hvd.basics import is_homogeneous as is_homogeneous
from lockstep.hvd.ops.allreduce import resolve_operation as handle_average_backwards_compatibility  # noqa: F401

# Horovod's autograd functions: classes whose `apply` has Horovod's arguments.


class HorovodAllreduce:
    @staticmethod
    def apply(tensor: Any, average: Any, name: Any, op: Any, pre: float, post: float, process_set: Any) -> Any:
        return hvd.allreduce(tensor, average, name, hvd.Compression.none, op, pre, post, process_set)


class HorovodGroupedAllreduce:
    @staticmethod
    def apply(average: Any, name: Any, op: Any, pre: float, post: float, process_set: Any, *tensors: Any) -> Any:
        none = hvd.Compression.none
        return tuple(hvd.grouped_allreduce(tensors, average, name, none, op, pre, post, process_set))


class HorovodAllgather:
    apply = staticmethod(hvd.allgather)


class HorovodGroupedAllgather:
    @staticmethod
    def apply(name: Any, process_set: Any, *tensors: Any) -> Any:
        return tuple(hvd.grouped_allgather(tensors, name, process_set))


class HorovodBroadcast:
    apply = staticmethod(hvd.broadcast)


class HorovodAlltoall:
    apply = staticmethod(hvd.alltoall)


class HorovodReducescatter:
    @staticmethod
    def apply(tensor: Any, name: Any, op: int, process_set: Any, prescale: float, postscale: float) -> Any:
        none = hvd.Compression.none
        return hvd.reducescatter(tensor, name, none, op, process_set, prescale, postscale)


class HorovodGroupedReducescatter:
    @staticmethod
    def apply(name: Any, op: int, process_set: Any, prescale: float, postscale: float, *tensors: Any) -> Any:
        none = hvd.Compression.none
        return tuple(hvd.grouped_reducescatter(tensors, name, none, op, process_set, prescale, postscale))
