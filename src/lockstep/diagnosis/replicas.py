"""Do the replicas of a model differ? Fingerprints of tensors, and the message about a difference.

A tensor's fingerprint is the sum of its elements' bits, read as integers, modulo 2**64: one pass over memory in any
layout, without rounding. It detects flipped bits and weights changed on one worker, but not permuted elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PART = 1 << 22  # elements that are summed at a time

Worker = tuple[str, list[int], str]
"""Host, fingerprints and processor."""


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of each tensor's bits as integers, int64 [T], on the first tensor's device, without synchronizing.

    Tensors may have any dtype, shape and strides.
    """
    import torch

    device = tensors[0].device
    return torch.stack([_sum_of_bits(tensor.detach()).to(device, non_blocking=True) for tensor in tensors])


def is_comparable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a fingerprint."""
    import torch

    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = tensor.view(integers[tensor.element_size()])
    if numbers.is_contiguous():
        numbers = numbers.view(-1)
    # In parts, since torch converts what it sums to int64 first.
    rows = max(1, PART // max(1, numbers[0].numel())) if numbers.ndim and len(numbers) else 1
    parts = numbers.split(rows) if numbers.numel() > PART else (numbers,)
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


def describe(
    step: int, names: Sequence[str], tensors: int, workers: Mapping[int, Worker], causes: str, switch: str
) -> str:
    """Return the message for replicas that differ.

    Args:
        names: The tensors that differ, in the model's order.
        tensors: How many were compared.
        workers: By rank: the host, the fingerprints of these tensors, and the processor.
        causes: The likely causes, and what to do.
        switch: How to turn the check off.
    """
    text = (
        f"the replicas differ after step {step}: {_different_ranks(workers)} in {len(names)} of {tensors} tensors, "
        f"first in {names[0]}. "
    )
    if unlike := _unlike(workers):
        return f"{text}{unlike}, and different processors may round differently: use identical hosts, or {switch}"
    return text + causes


def _unlike(workers: Mapping[int, Worker]) -> str | None:
    """Name a worker that differs and whose processor no worker with the usual weights has."""
    usual = _usual(workers)[0]
    kinds = {kind: rank for rank, (_, values, kind) in reversed([*workers.items()]) if tuple(values) == usual}
    for rank, (_, values, kind) in workers.items():
        if tuple(values) != usual and kind not in kinds:
            other, first = next(iter(kinds.items()))
            return f"Worker {rank} runs on {kind}, worker {first} on {other}"
    return None


def _usual(workers: Mapping[int, Worker]) -> tuple[tuple[int, ...], int]:
    """Return the most common fingerprints, and the number of workers that have them."""
    return Counter(tuple(values) for _, values, _ in workers.values()).most_common(1)[0]


def _different_ranks(workers: Mapping[int, Worker]) -> str:
    """Name the workers that differ from the majority, or all workers if there is no majority."""
    usual, count = _usual(workers)
    if 2 * count <= len(workers):
        return f"{_named(workers, workers)} differ from one another"
    odd = [rank for rank, (_, values, _) in workers.items() if tuple(values) != usual]
    return f"{_named(workers, odd)} differ{'s' * (len(odd) == 1)} from the other {count}"


def _named(workers: Mapping[int, Worker], chosen: Iterable[int]) -> str:
    ranks = [*chosen]
    named = [f"{rank} on {workers[rank][0]}" for rank in ranks[:8]]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(named)}{more}"
