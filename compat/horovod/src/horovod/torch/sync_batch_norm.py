"""The batch norm of `lockstep.hvd.sync_batch_norm`."""

from lockstep.hvd.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
