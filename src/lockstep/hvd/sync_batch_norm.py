"""hvd.SyncBatchNorm: batch normalization over the global batch, with Horovod's collectives."""

from __future__ import annotations

import torch

from lockstep.hvd import basics
from lockstep.hvd.engine.request import SUM
from lockstep.hvd.ops.allreduce import allreduce, allreduce_
from lockstep.hvd.ops.rows import allgather
from lockstep.models.global_batch_norm import GlobalBatchNorm, Peers

Tensor = torch.Tensor
FEW_WORKERS = 64  # up to this number, sending zeros for the other workers' rows is faster than an all-gather


class HorovodPeers:
    """All workers of the job, as peers of `GlobalBatchNorm`."""

    def gather(self, row: Tensor) -> Tensor:
        """Gather [F] of each worker into [workers, F]."""
        size = basics.size()
        if size > FEW_WORKERS:
            return allgather(row[None])
        # A sum takes one round: unlike an all-gather, it does not exchange the number of rows first.
        rows = row.new_zeros(size, len(row))
        rows[basics.rank()] = row
        return allreduce_(rows, op=SUM)

    def sum(self, row: Tensor) -> Tensor:
        """Sum [F] over the workers."""
        return allreduce(row, op=SUM)


class SyncBatchNorm(GlobalBatchNorm):
    """Like torch.nn.BatchNorm1d, 2d and 3d, with statistics of the global batch.

    Takes [batch, features, ...] on a CUDA device, with any number of samples on each worker. In evaluation mode, and
    with a single worker, it is ordinary batch normalization.

    Raises:
        ValueError: The input is on the CPU (as in Horovod), or has fewer than two dimensions.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cpu:
            raise ValueError("SyncBatchNorm expected input tensor to be on GPU")
        return self.normalize(input)

    def normalize(self, input: Tensor) -> Tensor:
        """Run `forward` on any device."""
        self.peers: Peers | None = HorovodPeers() if basics.size() > 1 else None
        return super().forward(input)
