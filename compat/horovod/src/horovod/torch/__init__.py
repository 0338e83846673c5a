"""Horovod's API for PyTorch, implemented by `lockstep.hvd`. The submodules are attributes, as libraries expect."""

from horovod.torch import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm
from lockstep.hvd import *  # noqa: F403
from lockstep.hvd import __all__ as _names

__all__ = [*_names, "compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm"]
