"""Checks of the weights of all workers: equal bit by bit every `--check-replicas` steps, finite in a checkpoint."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.data.sharding import Sharding
from lockstep.diagnosis.replicas import describe, fingerprints
from lockstep.errors import ConfigError, ReplicasDifferError
from lockstep.models.global_batch_norm import GlobalBatchNorm
from lockstep.world import accelerator
from lockstep.world.world import World

SYNCHRONIZED = (GlobalBatchNorm, nn.SyncBatchNorm)


CAUSES = (
    "Likely causes: code that changes weights on one worker (if rank == 0: ...), parameters unfrozen without another "
    "world.prepare(), a module that initializes or loads weights itself, or a faulty processor or memory. Resume from "
    "the last good checkpoint with --resume auto; if the same host differs again, exclude it"
)


def check_shares(model: nn.Module, sharding: Sharding, fix: str) -> None:
    """Check that each worker has samples in each step, if batch norm computes over the samples of all workers.

    Otherwise, a worker gets one of weight 0, which would count in the statistics.

    Raises:
        ConfigError: Some workers have none in an epoch's last step.
    """
    last = sharding.steps_per_epoch - 1
    if not min(sharding.counts(last)) and any(isinstance(module, SYNCHRONIZED) for module in model.modules()):
        raise ConfigError(
            f"the last step of an epoch has {sharding.count(last)} samples for {sharding.size} workers, but batch norm "
            f"over all workers needs one of each: {fix}, or change the batch size or the number of workers"
        )


class ReplicaCheck:
    """Compares fingerprints of the weights, in one collective of 16 bytes per tensor while they are equal.

    Args:
        every: Steps between two checks; 0: never. A single worker compares nothing.
    """

    def __init__(self, world: World, weights: nn.Module, every: int):
        wanted = world.size > 1 and any(True for _ in equal_tensors(weights))
        self.weights, self._world, self._every = weights, world, every if wanted else 0
        self._checked = -1

    def check_due(self, step: int) -> None:
        """Compare the replicas after a step, if a check is due. Collective.

        Raises:
            ReplicasDifferError: The replicas differ; raised on all workers at the same step.
        """
        if self._every and step % self._every == 0:
            self.check(step)

    def check(self, step: int) -> None:
        """Compare the replicas after a step, whether or not a check is due. Collective.

        Raises:
            ReplicasDifferError: As for `check_due`.
        """
        if not self._every or step == self._checked:
            return
        names, tensors = zip(*equal_tensors(self.weights), strict=True)
        sums = fingerprints(tensors)
        # Equal everywhere if maximum and minimum agree; the minimum is ~max(~x), so one collective gives both.
        largest, inverted = self._world.max_(torch.cat([sums, ~sums])).chunk(2)
        different = (largest != ~inverted).nonzero().flatten().tolist()  # the only wait for the device
        if different:
            rows = self._world.gather(
                [socket.gethostname(), sums[different].tolist(), accelerator.processor(sums.device)]
            )
            differing = [names[index] for index in different]
            workers = dict(enumerate(rows))
            raise ReplicasDifferError(describe(step, differing, len(names), workers, CAUSES, "add --check-replicas 0"))
        self._checked = step


def equal_tensors(weights: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are equal on all workers, in model order: parameters, and statistics of --sync-bn.

    Other buffers may differ between workers.
    """
    for prefix, module in weights.named_modules():
        shared = isinstance(module, SYNCHRONIZED)
        tensors = [*module.named_parameters(recurse=False), *(module.named_buffers(recurse=False) if shared else ())]
        for name, tensor in tensors:
            yield f"{prefix}.{name}" if prefix else name, tensor


def are_finite(world: World, weights: nn.Module) -> bool:
    """Return whether all parameters on all workers are finite. Collective; waits once for the device."""
    own = (each.to_local() if isinstance(each, DTensor) else each for each in weights.parameters())
    flags = [each.isfinite().all().to(world.device, non_blocking=True) for each in own]
    if not flags:
        return True
    return not world.max_((~torch.stack(flags)).any().to(torch.int32).reshape(1)).item()
