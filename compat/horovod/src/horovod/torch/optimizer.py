"""The optimizer of `lockstep.hvd.optimizer.distributed`."""

import torch

from lockstep.hvd.optimizer.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]


class _DistributedOptimizer(torch.optim.Optimizer):
    """For annotations. What `DistributedOptimizer` makes is an instance of the user's class, not of this one."""


class _DistributedAdasumOptimizer(torch.optim.Optimizer):
    """The same for `op=Adasum`."""
