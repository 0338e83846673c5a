"""Horovod on Ray; implemented by `lockstep.integrations.ray`."""

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("horovod.ray needs Ray: pip install 'lockstep-torch[ray]'") from error

from horovod.ray import elastic, ray_logger, runner, utils, worker
from lockstep.integrations.ray.actor import BaseHorovodWorker
from lockstep.integrations.ray.executor import ElasticRayExecutor, RayExecutor

__all__ = [
    "BaseHorovodWorker",
    "ElasticRayExecutor",
    "RayExecutor",
    "elastic",
    "ray_logger",
    "runner",
    "utils",
    "worker",
]
