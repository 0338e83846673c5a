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
from lockstep.models.global_batch_norm import has_other_buffers
from lockstep.run.data_parallel import broadcast, replicate, synchronize_batch_norm
from lockstep.train.strategies.base import Strategy, mark_before_wait
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
        synchronize_batch_norm(model, self._world)

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
