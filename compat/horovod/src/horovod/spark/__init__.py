"""Run Horovod functions in the tasks of a Spark job."""

try:
    import pyspark as _pyspark  # noqa: F401
except ImportError as error:
    raise ImportError("horovod.spark needs PySpark: pip install 'lockstep-horovod[spark]'") from error

from horovod.spark import runner, task
from horovod.spark.runner import run, run_elastic

__all__ = ["run", "run_elastic", "runner", "task"]
