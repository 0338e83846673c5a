"""Models that average their gradients over the workers: DistributedDataParallel with buckets in a fixed order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.models.buffers import unexpanded
from lockstep.models.global_batch_norm import GlobalBatchNorm, check_batch_norm, convert_batch_norm
from lockstep.world.world import World


def synchronize_batch_norm(model: nn.Module, world: World) -> None:
    """Make the model's batch norms compute statistics over all workers.

    Raises:
        ConfigError: A batch norm does more than torch's.
    """
    check_batch_norm(model)
    if world.size > 1 and world.device.type == "cpu":
        convert_batch_norm(model, GlobalBatchNorm, peers=GroupPeers())
    elif world.size > 1:
        convert_batch_norm(model, nn.SyncBatchNorm, process_group=None)


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


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Private names of nn.Module, which has no public way to skip hooks."""


@contextmanager
def bare_forward(module: nn.Module) -> Iterator[None]:
    """Make the module, called without arguments, return a scalar (float32, 0) that depends on all trained parameters.

    Gradients arrive in reverse order of definition, in one pass that runs the hooks of the module's wrappers. Its own
    hooks, which may look at inputs, are not called.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def touch_parameters() -> torch.Tensor:
        # Autograd runs the newest branch first, so the last parameter's gradient arrives first.
        return torch.stack([parameter.sum().float() * 0 for parameter in parameters]).sum()

    own_forward = vars(module).get("forward")
    own_hooks = {name: vars(module)[name] for name in HOOKS if name in vars(module)}
    vars(module).update({name: OrderedDict() for name in own_hooks})
    module.forward = touch_parameters
    try:
        yield
    finally:
        vars(module).update(own_hooks)
        del module.forward
        if own_forward is not None:
            module.forward = own_forward
