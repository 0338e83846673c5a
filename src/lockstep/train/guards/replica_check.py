"""Compare the weights of all workers bit by bit, every `--check-replicas` steps.

A tensor's fingerprint is the sum of its elements' bits, read as integers, modulo 2**64: one pass over memory in any
layout, without rounding. It detects flipped bits and weights changed on one worker, but not permuted elements.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lockstep.errors import ReplicasDifferError
from lockstep.nn.global_batch_norm import GlobalBatchNorm
from lockstep.world import accelerator
from lockstep.world.world import World

Worker = tuple[str, list[int], str]
"""Host, fingerprints and processor."""

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
            rows = self._world.gather([socket.gethostname(), sums[different].tolist(), processor(sums.device)])
            raise ReplicasDifferError(describe(step, [names[index] for index in different], len(names), rows))
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


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of each tensor's bits as integers, int64 [T], on the first tensor's device, without synchronizing.

    Tensors may have any dtype, shape and strides.
    """
    device = tensors[0].device
    return torch.stack([_sum_of_bits(tensor.detach()).to(device, non_blocking=True) for tensor in tensors])


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_WHOLE_NUMBERS[tensor.element_size()]).sum(dtype=torch.int64)


def processor(device: torch.device) -> str:
    """Name the processor of a device, as far as it affects rounding."""
    if device.type != "cpu":
        return accelerator.name(device)
    return f"a CPU with {torch.backends.cpu.get_cpu_capability()}"


def describe(step: int, names: Sequence[str], tensors: int, workers: Sequence[Worker]) -> str:
    """Return the message for replicas that differ.

    Args:
        names: The tensors that differ, in the model's order.
        tensors: How many were compared.
        workers: By rank: the host, the fingerprints of these tensors, and the processor.
    """
    unlike = _unlike(workers)
    if unlike:
        return (
            f"the replicas differ after step {step}: {_different_ranks(workers)} in {len(names)} of {tensors} "
            f"tensors, first in {names[0]}. {unlike}, and different processors may round differently: use identical "
            f"hosts, or add --check-replicas 0"
        )
    return (
        f"the replicas differ after step {step}: {_different_ranks(workers)} in {len(names)} of {tensors} tensors, "
        f"first in {names[0]}. Likely causes: code that changes weights on one worker (if rank == 0: ...), a module "
        f"that initializes or loads weights itself, or a faulty processor or memory. Resume from the last good "
        f"checkpoint with --resume auto; if the same host differs again, exclude it"
    )


def _unlike(workers: Sequence[Worker]) -> str:
    """Name a worker that differs and whose processor no worker with the usual weights has; "" if there is none."""
    usual = _usual(workers)[0]
    kinds = {kind: rank for rank, (_, values, kind) in reversed([*enumerate(workers)]) if tuple(values) == usual}
    for rank, (_, values, kind) in enumerate(workers):
        if tuple(values) != usual and kind not in kinds:
            other, first = next(iter(kinds.items()))
            return f"Worker {rank} runs on {kind}, worker {first} on {other}"
    return ""


def _usual(workers: Sequence[Worker]) -> tuple[tuple[int, ...], int]:
    """Return the most common fingerprints, and the number of workers that have them."""
    return Counter(tuple(values) for _, values, _ in workers).most_common(1)[0]


def _different_ranks(workers: Sequence[Worker]) -> str:
    """Name the workers that differ from the majority, or all workers if there is no majority."""
    usual, count = _usual(workers)
    if 2 * count <= len(workers):
        return f"{_named(workers, range(len(workers)))} differ from one another"
    odd = [rank for rank, (_, values, _) in enumerate(workers) if tuple(values) != usual]
    return f"{_named(workers, odd)} differ{'s' * (len(odd) == 1)} from the other {count}"


def _named(workers: Sequence[Worker], ranks: Sequence[int]) -> str:
    named = [f"{rank} on {workers[rank][0]}" for rank in ranks[:8]]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(named)}{more}"
