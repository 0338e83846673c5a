"""hvd.SyncBatchNorm: batch normalisation over the batches of all workers, by Horovod's collectives."""

from __future__ import annotations

import torch

from lockstep.hvd import basics
from lockstep.hvd.engine.reduction import SUM
from lockstep.hvd.ops.allgather import allgather
from lockstep.hvd.ops.allreduce import allreduce, allreduce_
from lockstep.nn.global_batch_norm import GlobalBatchNorm, Peers

Tensor = torch.Tensor
FEW_WORKERS = 64  # up to so many, zeros for the others' rows cost less than telling how many rows each has


class HorovodPeers:
    """All workers of the job."""

    def gather(self, row: Tensor) -> Tensor:
        """[F] of each worker to [workers, F]."""
        size = basics.size()
        if size > FEW_WORKERS:
            return allgather(row[None])
        # As a sum, for which one round will do: the workers need not tell how many rows each has.
        rows = row.new_zeros(size, len(row))
        rows[basics.rank()] = row
        return allreduce_(rows, op=SUM)

    def sum(self, row: Tensor) -> Tensor:
        """[F] of each worker, added up."""
        return allreduce(row, op=SUM)


class SyncBatchNorm(GlobalBatchNorm):
    """Like torch.nn.BatchNorm1d, 2d and 3d, over the global batch.

    Takes [batch, features, ...] on a CUDA device, with any number of samples on each worker. In evaluation, and where
    the worker is alone, it is plain batch normalisation.

    Raises:
        ValueError: The input is on the CPU, as Horovod has it, or has fewer than two dimensions.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cpu:
            raise ValueError("SyncBatchNorm expected input tensor to be on GPU")
        return self.normalise(input)

    def normalise(self, input: Tensor) -> Tensor:
        """`forward` on any device."""
        self.peers: Peers | None = HorovodPeers() if basics.size() > 1 else None
        return super().forward(input)
