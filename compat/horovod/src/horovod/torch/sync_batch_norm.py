"""The batch norm of `lockstep.hvd.sync_batch_norm`."""

from lockstep.hvd.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
