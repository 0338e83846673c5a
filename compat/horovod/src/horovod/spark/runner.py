"""The functions of `lockstep.integrations.spark`."""

from lockstep.integrations.spark import run, run_elastic

__all__ = ["run", "run_elastic"]
