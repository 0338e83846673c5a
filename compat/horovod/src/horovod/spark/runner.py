"""The functions of `lockstep.integrations.spark.run`."""

from lockstep.integrations.spark.run import run, run_elastic

__all__ = ["run", "run_elastic"]
