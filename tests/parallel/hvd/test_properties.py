"""Any sequence of operations, submitted in any order on each worker, gives what a slow reference computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_group import run_in_workers

from lockstep import hvd
from lockstep.world.world import World

DTYPES = ("float32", "float64", "int32", "int64")
REDUCTIONS = {hvd.Sum: np.add, hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}


@dataclass(frozen=True)
class Operation:
    kind: str
    dtype: str
    shape: tuple[int, ...]
    op: int
    root: int
    in_place: bool
    seed: int


operations = st.builds(
    Operation,
    kind=st.sampled_from(["allreduce", "grouped", "allgather", "broadcast", "alltoall", "reducescatter"]),
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(0,), (1,), (5,), (6, 3), (2, 0), (700,), (3, 1000), (300_000,)]),
    op=st.sampled_from([hvd.Average, *REDUCTIONS]),
    root=st.integers(0, 2),
    in_place=st.booleans(),
    seed=st.integers(0, 1000),
)


def _input(operation: Operation, rank: int, part: int = 0) -> np.ndarray:
    shape = operation.shape
    if operation.kind == "allgather":
        shape = ((operation.seed + rank) % 4, *shape[1:])
    generator = np.random.default_rng((operation.seed, rank, part))
    return generator.integers(-4, 5, shape).astype(operation.dtype)


def _reduced(inputs: Sequence[np.ndarray], op: int) -> np.ndarray:
    if op != hvd.Average:
        return reduce(REDUCTIONS[op], inputs)
    total = reduce(np.add, inputs)
    return np.trunc(total / len(inputs)).astype(total.dtype) if total.dtype.kind == "i" else total / len(inputs)


def reference(operation: Operation, rank: int, size: int) -> list[np.ndarray]:
    """What the worker must get, computed from all workers' inputs in one process."""
    inputs = [_input(operation, other) for other in range(size)]
    if operation.kind == "allreduce":
        return [_reduced(inputs, operation.op)]
    if operation.kind == "grouped":
        return [_reduced([_input(operation, other, part) for other in range(size)], operation.op) for part in range(3)]
    if operation.kind == "allgather":
        return [np.concatenate(inputs)]
    if operation.kind == "broadcast":
        return [inputs[operation.root % size]]
    if operation.kind == "alltoall":
        share = len(inputs[0]) // size
        return [np.concatenate([one[rank * share : (rank + 1) * share] for one in inputs])]
    op = operation.op if operation.op in (hvd.Average, hvd.Sum) else hvd.Sum
    return [np.array_split(_reduced(inputs, op), size)[rank]]


def begin(operation: Operation, name: str, rank: int, size: int) -> int:
    tensor = torch.from_numpy(_input(operation, rank))
    if operation.kind == "allreduce":
        call = hvd.allreduce_async_ if operation.in_place else hvd.allreduce_async
        return call(tensor, name=name, op=operation.op)
    if operation.kind == "grouped":
        tensors = [torch.from_numpy(_input(operation, rank, part)) for part in range(3)]
        call = hvd.grouped_allreduce_async_ if operation.in_place else hvd.grouped_allreduce_async
        return call(tensors, name=name, op=operation.op)
    if operation.kind == "allgather":
        return hvd.allgather_async(tensor, name=name)
    if operation.kind == "broadcast":
        call = hvd.broadcast_async_ if operation.in_place else hvd.broadcast_async
        return call(tensor, operation.root % size, name=name)
    if operation.kind == "alltoall":
        share = len(tensor) // size
        return hvd.alltoall_async(tensor, splits=torch.tensor([share] * size, dtype=torch.int32), name=name)
    op = operation.op if operation.op in (hvd.Average, hvd.Sum) else hvd.Sum
    return hvd.reducescatter_async(tensor, name=name, op=op)


def _run(world: World, sequences: Sequence[Sequence[Operation]]) -> None:
    for number, sequence in enumerate(sequences):
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        order = list(range(len(sequence)))
        random.Random(f"{rank} {number}").shuffle(order)
        handles = {index: begin(sequence[index], f"op{index}", rank, size) for index in order}
        for index in reversed(order):
            result: Any = hvd.synchronize(handles[index])
            results = (
                result if sequence[index].kind == "grouped" else result[:1] if isinstance(result, tuple) else [result]
            )
            expected = reference(sequence[index], rank, size)
            for got, wanted in zip(results, expected, strict=True):
                np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6, err_msg=str(sequence[index]))
                assert got.numpy().dtype == wanted.dtype
        hvd.shutdown()


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(sequences=st.lists(st.lists(operations, max_size=40), min_size=3, max_size=6))
def test_sequences_in_different_orders_match_the_reference(sequences: list[list[Operation]]) -> None:
    run_in_workers(3, _run, sequences)
