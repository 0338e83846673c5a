"""Horovod on Spark; implemented by `lockstep.integrations.spark`."""

try:
    import pyspark as _pyspark  # noqa: F401
except ImportError as error:
    raise ImportError("horovod.spark needs PySpark: pip install 'lockstep-torch[spark]'") from error

from horovod.spark import runner, task
from lockstep.integrations.spark import run, run_elastic

__all__ = ["run", "run_elastic", "runner", "task"]
