"""Compare the weights of all workers bit by bit, every `--check-replicas` steps."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import torch
from torch import nn

from lockstep.errors import ReplicasDifferError
from lockstep.models.global_batch_norm import GlobalBatchNorm
from lockstep.models.replicas import describe, fingerprints
from lockstep.world import accelerator
from lockstep.world.world import World

CAUSES = (
    "Likely causes: code that changes weights on one worker (if rank == 0: ...), a module that initializes or loads "
    "weights itself, or a faulty processor or memory. Resume from the last good checkpoint with --resume auto; if the "
    "same host differs again, exclude it"
)


class ReplicaCheck:
    """Compares nothing: for one worker, and for --check-replicas 0."""

    def check_due(self, step: int) -> None:
        """Compare the replicas after a step, if a check is due. Collective.

        Raises:
            ReplicasDifferError: The replicas differ; raised on all workers at the same step.
        """

    def check(self, step: int) -> None:
        """Compare the replicas after a step, whether or not a check is due. Collective.

        Raises:
            ReplicasDifferError: As for `check_due`.
        """

    def forget(self) -> None:
        """Forget which step was checked, after a rewind."""


class FingerprintCheck(ReplicaCheck):
    """Compares fingerprints of the weights, in one collective of 16 bytes per tensor while they are equal."""

    def __init__(self, world: World, weights: nn.Module, every: int):
        self._world, self._every = world, every
        self._weights = weights
        self._checked = -1

    def check_due(self, step: int) -> None:
        if step % self._every == 0:
            self.check(step)

    def check(self, step: int) -> None:
        if step == self._checked:
            return
        names, tensors = zip(*equal_tensors(self._weights), strict=True)
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

    def forget(self) -> None:
        self._checked = -1


def build_replica_check(world: World, weights: nn.Module, every: int) -> ReplicaCheck:
    """Return the check of `weights` every `every` steps; a no-op for 0 steps or one worker."""
    wanted = every > 0 and world.size > 1 and any(True for _ in equal_tensors(weights))
    return FingerprintCheck(world, weights, every) if wanted else ReplicaCheck()


def equal_tensors(weights: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are equal on all workers, in model order: parameters, and statistics of --sync-bn.

    Other buffers may differ between workers.
    """
    for prefix, module in weights.named_modules():
        shared = isinstance(module, GlobalBatchNorm | nn.SyncBatchNorm)
        tensors = [*module.named_parameters(recurse=False), *(module.named_buffers(recurse=False) if shared else ())]
        for name, tensor in tensors:
            yield f"{prefix}.{name}" if prefix else name, tensor
