"""Run Horovod functions on a Ray cluster."""

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("horovod.ray needs Ray: pip install 'lockstep-horovod[ray]'") from error

from horovod.ray import elastic as elastic
from horovod.ray import ray_logger as ray_logger
from horovod.ray import runner as runner
from horovod.ray import utils as utils
from horovod.ray import worker as worker
from horovod.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
from horovod.ray.runner import RayExecutor as RayExecutor
from horovod.ray.worker import BaseHorovodWorker as BaseHorovodWorker
