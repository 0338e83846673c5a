"""Run Horovod functions on a Ray cluster."""

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("horovod.ray needs Ray: pip install 'lockstep-horovod[ray]'") from error

from horovod.ray import elastic, ray_logger, runner, utils, worker
from horovod.ray.elastic import ElasticRayExecutor
from horovod.ray.runner import RayExecutor
from horovod.ray.worker import BaseHorovodWorker

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
