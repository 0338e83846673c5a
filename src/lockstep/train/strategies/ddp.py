"""DistributedDataParallel: replicas average their gradients during the backward pass."""

# No "from __future__ import annotations": torch checks that the annotations of a hook are types.

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.config.schema import ParallelConfig
from lockstep.models.buffers import unexpanded
from lockstep.models.global_batch_norm import GlobalBatchNorm
from lockstep.train.strategies.base import (
    Strategy,
    bare_forward,
    check_batch_norm,
    convert_batch_norm,
    has_other_buffers,
    mark_before_wait,
)
from lockstep.world.world import World

Future = torch.futures.Future[torch.Tensor]
HALF_BYTES = 2
HALF_HOOKS: dict[str, Callable[[Any, dist.GradBucket], Future]] = {
    "fp16": fp16_compress_hook,
    "bf16": bf16_compress_hook,
}


class DistributedStrategy(Strategy):
    """torch's DistributedDataParallel, with a bucket layout that depends only on the order of the parameters.

    With `--compress fp16` or `bf16`, gradients are summed in half the bytes of float32. With `--shard-optimizer`, the
    optimizer state is sharded over the workers (S. Rajbhandari et al., "ZeRO", arXiv 1910.02054, stage 1; torch's
    ZeroRedundancyOptimizer).
    """

    name = "ddp"

    def __init__(self, world: World, parallel: ParallelConfig):
        super().__init__()
        self._world = world
        self._parallel = parallel
        self._shards = parallel.shard_optimizer and world.size > 1
        if self._shards:
            self.waits_in = (*self.waits_in, "optimizer")  # for the updated weights
        self.gathers_state = self._shards
        self.workers_averaged = world.size
        self._ddp: DistributedDataParallel | None = None

    def synchronize_batch_norm(self, model: nn.Module) -> None:
        check_batch_norm(model)
        if self._world.size > 1 and self._world.device.type == "cpu":
            convert_batch_norm(model, GlobalBatchNorm, peers=GroupPeers())
        elif self._world.size > 1:
            convert_batch_norm(model, nn.SyncBatchNorm, process_group=None)

    def wrap(self, model: nn.Module) -> nn.Module:
        if self._world.size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        self._ddp = replicate(model, self._world, self._parallel.find_unused_parameters)
        # Batch norm does not read its statistics in training, and the loop broadcasts them before evaluations. Set as
        # an attribute, because the constructor's argument would also disable the initial broadcast.
        self._ddp.broadcast_buffers = has_other_buffers(model)
        if self._ddp.broadcast_buffers:
            self.waits_in = (*self.waits_in, "forward")
        self.compress(self._ddp)
        return self._ddp

    def compress(self, ddp: DistributedDataParallel) -> None:
        """Compress the gradients of a model, if configured."""
        if self._parallel.compress in HALF_HOOKS:
            ddp.register_comm_hook(None, self._reduce_half)

    def _reduce_half(self, state: object, bucket: dist.GradBucket) -> Future:
        self.traffic.plain_bytes += bucket.buffer().nbytes
        self.traffic.sent_bytes += bucket.buffer().numel() * HALF_BYTES
        return HALF_HOOKS[self._parallel.compress](None, bucket)

    def build_optimizer(
        self, kind: type[Optimizer], groups: Sequence[dict[str, Any]], settings: Mapping[str, Any]
    ) -> Optimizer:
        if not self._shards:
            return super().build_optimizer(kind, groups, settings)
        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **settings)

    def mark_reduction(self, losses: torch.Tensor, mark: Callable[[], None]) -> None:
        if self._ddp is not None:
            mark_before_wait(losses, mark)

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        if is_last or self._ddp is None:
            return nullcontext()
        unreduced: AbstractContextManager[None] = self._ddp.no_sync()
        return unreduced

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        broadcast(self._world, tensors)

    def gather_state(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.consolidate_state_dict(to=0)


class GroupPeers:
    """Combines batch norm statistics of the workers with torch.distributed collectives."""

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Gather [F] of each worker to [workers, F]."""
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    def sum(self, row: torch.Tensor) -> torch.Tensor:
        """Sum [F] over the workers."""
        dist.all_reduce(row)
        return row


SENT = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
SENT |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
"""Dtypes that all backends send."""


def broadcast(world: World, tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's values to all workers, in place, as bytes: tensors of any dtype and layout, also expanded ones."""
    for tensor in tensors if world.size > 1 else ():
        own = unexpanded(tensor.detach())
        # Also of one element, which may have any stride; contiguous() keeps it.
        values = own.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        dist.broadcast(values.view(-1).view(torch.uint8), src=0, group=world.group_for(values))
        own.copy_(values)


def replicate(model: nn.Module, world: World, find_unused_parameters: bool) -> DistributedDataParallel:
    """Return a model in DistributedDataParallel, with settled buckets. Collective.

    What torch's collectives refuse among the tensors that are not trained, by dtype or as expanded, is sent as bytes.
    """
    unsent = {
        name: tensor
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if not tensor.requires_grad and (tensor.dtype not in SENT or unexpanded(tensor) is not tensor)
    }
    broadcast(world, unsent.values())
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *unsent}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    replica = DistributedDataParallel(
        model,  # no device_ids: with them DDP raises IndexError when called without inputs (settle_buckets)
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,
    )

    def send_buffers(replica: DistributedDataParallel, _: object) -> None:
        if replica.training and replica.broadcast_buffers:
            broadcast(world, [buffer for name, buffer in model.named_buffers() if name in unsent])

    if unsent:
        replica.register_forward_pre_hook(send_buffers)
    settle_buckets(replica)
    return replica


def settle_buckets(ddp: DistributedDataParallel) -> None:
    """Make DDP lay out its buckets now, in reverse order of the parameters.

    By default, DDP reduces the first step in one bucket, and then rebuilds its buckets in the order in which the
    gradients of that step arrived. The layout determines how a ring all-reduce splits a bucket, and so, with 3 or more
    workers, the order of additions: the first step after a resume would round differently than in an uninterrupted run.
    A backward pass over the parameters alone replaces this first step. Its gradients arrive in reverse order of
    definition, so the layout is fixed before training starts.
    """
    with bare_forward(ddp.module):
        ddp().backward()
    for parameter in ddp.module.parameters():
        parameter.grad = None
