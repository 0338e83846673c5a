"""The optimizer of `lockstep.hvd.optimizer.distributed`."""

import torch

from lockstep.hvd.optimizer.distributed import DistributedOptimizer as DistributedOptimizer


class _DistributedOptimizer(torch.optim.Optimizer):
    """Only for annotations: `DistributedOptimizer` returns an instance of a subclass of the user's class."""


class _DistributedAdasumOptimizer(torch.optim.Optimizer):
    """The same for `op=Adasum`."""
