"""DistributedDataParallel: replicas average their gradients while the backward pass runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.train.strategies.base import Strategy
from lockstep.world import World


class DistributedStrategy(Strategy):
    """torch's DistributedDataParallel, with buckets whose layout depends on the parameters' order alone."""

    name = "ddp"

    def __init__(self, world: World, find_unused_parameters: bool = False):
        self._world = world
        self._find_unused = find_unused_parameters
        self.workers_averaged = world.size
        self._ddp: DistributedDataParallel | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        if self._world.size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[self._world.device] if self._world.device.type == "cuda" else None,
            find_unused_parameters=self._find_unused,
            gradient_as_bucket_view=True,
        )
        settle_buckets(self._ddp)
        return self._ddp

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last or self._ddp is None else self._without_reduction(self._ddp)

    @contextmanager
    def _without_reduction(self, ddp: DistributedDataParallel) -> Iterator[None]:
        with ddp.no_sync():
            yield

    def sync_buffers(self, model: nn.Module) -> None:
        if self._world.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)


def settle_buckets(ddp: DistributedDataParallel) -> None:
    """Make DDP lay out its buckets now, in reverse order of the parameters.

    Left to itself, DDP reduces the first step in one bucket and then rebuilds its buckets in the order in which that
    step's gradients arrived. The layout decides where a ring all-reduce cuts a bucket, and with 3 workers or more so
    the order of additions: the first step after a resume would round differently from the same step of the
    uninterrupted run. Here a backward pass over the bare parameters stands in for that first step: its gradients
    arrive in reverse order of definition, and the layout is settled before training starts.
    """
    module = ddp.module
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def touch_parameters() -> torch.Tensor:
        # The engine runs the youngest branch first, and so the last parameter's gradient arrives first.
        return torch.stack([parameter.sum() * 0 for parameter in parameters]).sum()

    own_forward = vars(module).get("forward")
    module.forward = touch_parameters
    try:
        ddp().backward()
    finally:
        del module.forward
        if own_forward is not None:
            module.forward = own_forward
    for parameter in parameters:
        parameter.grad = None
