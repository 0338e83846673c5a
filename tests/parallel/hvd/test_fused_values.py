"""Fusion gives the same values however it is executed: averages by the library, and several loads of the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp
from worker_group import run_in_workers

from lockstep import hvd
from lockstep.hvd.engine import connections, exchange, fusion, transfers
from lockstep.world.world import World


class AveragingTransfers(transfers.GlooTransfers):
    """Averages as NCCL does: multiplies by 1/size in the tensors' dtype before the sum."""

    averages = True
    averaged: set[torch.dtype]

    def all_reduce(self, tensors: Sequence[torch.Tensor], operation: ReduceOp.RedOpType) -> None:
        if operation == ReduceOp.AVG:
            for tensor in tensors:
                self.averaged.add(tensor.dtype)
                tensor.mul_(torch.tensor(1 / self.size, dtype=tensor.dtype))
            operation = ReduceOp.SUM
        super().all_reduce(tensors, operation)


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = [(3000,), (70, 50), (300_000,), (0,), (1200,)]  # of the third, only halves are small enough for the buffer


def inputs(rank: int) -> list[torch.Tensor]:
    """Return a worker's tensors, of whole numbers, which are exact in all dtypes; the last ones are not contiguous."""
    chance = np.random.default_rng(rank)
    tensors = [
        torch.from_numpy(chance.integers(-20, 20, shape)).to(dtype)
        for dtype in (*FLOATS, torch.int64, torch.bool)
        for shape in SHAPES
    ]
    wide = [torch.from_numpy(chance.integers(-20, 20, shape)).to(torch.float32) for shape in ((600_000, 2), (300, 2))]
    return [*tensors, *[one[:, 0] for one in wide]]


def reference(size: int) -> list[torch.Tensor]:
    """Return, as float64, what `_values` must return."""
    stacks = [torch.stack(tensors).double() for tensors in zip(*map(inputs, range(size)), strict=True)]
    dtypes = [tensor.dtype for tensor in inputs(0)]
    averages = [
        stack.mean(0).trunc() if dtype == torch.int64 else stack.amin(0) if dtype == torch.bool else stack.mean(0)
        for stack, dtype in zip(stacks, dtypes, strict=True)
    ]
    sums = [stack.amax(0) if dtype == torch.bool else stack.sum(0) for stack, dtype in zip(stacks, dtypes, strict=True)]
    scaled = [1.5 * average for average in averages[: len(FLOATS) * len(SHAPES)]]
    return [*averages, *scaled, *sums, *averages[::4], *averages, *[stack.amax(0) for stack in stacks]]


def _values(world: World, by_library: bool, buffer_bytes: int) -> tuple[list[Any], set[torch.dtype]]:
    """Return the results of operations, alone and fused, and the dtypes that the library averaged."""
    AveragingTransfers.averaged = set()
    if by_library:
        connections.GlooTransfers = AveragingTransfers  # type: ignore[misc]
    fusion.BUFFER_BYTES = exchange.BUFFER_BYTES = buffer_bytes
    hvd.init()
    tensors = inputs(world.rank)
    floats = tensors[: len(FLOATS) * len(SHAPES)]
    results = [
        *hvd.grouped_allreduce(tensors),
        *hvd.grouped_allreduce(floats, prescale_factor=0.5, postscale_factor=3),
        *hvd.grouped_allreduce(tensors, op=hvd.Sum),
        *[hvd.allreduce(tensor) for tensor in tensors[::4]],
        *hvd.grouped_allreduce_([tensor.clone() for tensor in tensors]),
        *hvd.grouped_allreduce_(tensors, op=hvd.Max),
    ]
    hvd.shutdown()
    return [result.double().numpy() for result in results], AveragingTransfers.averaged


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("by_library", [False, True])
def test_every_dtype_is_reduced_as_by_a_reference(size: int, by_library: bool) -> None:
    # Thirds are rounded in half precision, which the library would do twice, so it averages halves only for 2 workers.
    averaged = {2: set(FLOATS), 3: {torch.float32, torch.float64}}[size] if by_library else set()
    tolerance = {2: 0, 3: 0.01}[size]
    for values, dtypes in run_in_workers(size, _values, by_library, 32 << 20):
        assert dtypes == averaged
        for value, expected in zip(values, reference(size), strict=True):
            np.testing.assert_allclose(value, expected.numpy(), rtol=tolerance, atol=tolerance / 1000)


@pytest.mark.parametrize("buffer_bytes", [1, 10_000, 1 << 20])
def test_the_size_of_the_buffer_changes_no_value(buffer_bytes: int) -> None:
    for values, _ in run_in_workers(2, _values, False, buffer_bytes):
        for value, expected in zip(values, reference(2), strict=True):
            np.testing.assert_array_equal(value, expected.numpy())
