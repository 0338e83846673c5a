"""The functions of `lockstep.integrations.spark.jobs`."""

from lockstep.integrations.spark.jobs import run, run_elastic

__all__ = ["run", "run_elastic"]
