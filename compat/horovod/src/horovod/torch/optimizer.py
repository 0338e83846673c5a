"""The optimizer of `lockstep.hvd.optimizer`."""

from lockstep.hvd.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
