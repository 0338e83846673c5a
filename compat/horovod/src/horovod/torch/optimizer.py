"""The optimizer of `lockstep.hvd.optimizer.distributed`."""

from lockstep.hvd.optimizer.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
