"""Measure the time of collectives by message size, between the workers of a job.

Sizes and bandwidths are defined as in NVIDIA's nccl-tests (doc/PERFORMANCE.md), for comparison. The algorithm bandwidth
is size over time. The bus bandwidth is the rate that each worker's link must sustain, independent of the number of
workers. The size is that of the whole array: each worker's output of `all_gather`, and each worker's input of
`reduce_scatter` and `all_to_all`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lockstep.errors import LockstepError, first_line, is_lost_peer
from lockstep.study.figures import Spread, spread
from lockstep.world import accelerator
from lockstep.world.devices import GLOO
from lockstep.world.world import World

BARRIER = "barrier"
MIN_REPEATS = 3
MAX_CALLS = 1000  # per repeat
WARM_UP_CALLS = 5
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class WrongResultError(LockstepError):
    """A collective returned a wrong result. Exit code 1."""


class Arrays(NamedTuple):
    """Input and output of an operation, which may be the same array."""

    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class Operation:
    """A collective of torch.distributed.

    Args:
        call: Runs the operation once.
        bus_factor: Ratio of bus to algorithm bandwidth, by the number of workers.
        expect: Returns the expected target, given the rank, the number of workers and the indices of all elements;
            None if the rank gets no result.
        splits: The array that is split among the workers: "source" or "target". "none": neither, but the number of
            elements must be divisible by the number of workers. "": neither, and any number of elements.
        in_place: Whether source and target are the same array.
    """

    name: str
    call: Callable[[Arrays], object]
    bus_factor: Callable[[int], float]
    expect: Callable[[int, int, torch.Tensor], torch.Tensor | None]
    is_sum: bool = False
    splits: str = ""
    in_place: bool = False


class SizeLength(NamedTuple):
    """Limits for measuring one size: at most `repeats` repeats in about `seconds`, but at least MIN_REPEATS."""

    repeats: int
    seconds: float


@dataclass(frozen=True)
class SizePoint:
    """The result for one size; `seconds` is the time of one call on the slowest worker."""

    size_bytes: int
    seconds: Spread
    repeats: int
    calls: int
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields for the record; bandwidths are in bytes/s."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        return {**known, "seconds": self.seconds._asdict()}


def _summand(rank: int, index: torch.Tensor) -> torch.Tensor:
    """Return a worker's input to a sum: 0, 1 and 2, in an order per worker. Such sums are exact in 16 bits."""
    return index * (rank + 1) % 3


def _item(rank: int, index: torch.Tensor) -> torch.Tensor:
    """Return a worker's input to operations without a sum: numbers below 128, different per worker."""
    return (index + rank) % 128


def _total(size: int, index: torch.Tensor) -> torch.Tensor:
    """Return the sum of `_summand` over the workers; it repeats every three elements."""
    three = torch.arange(3, device=index.device)
    sums = torch.stack([_summand(rank, three) for rank in range(size)]).sum(0)
    return sums[index % 3]


def _part(rank: int, size: int, values: torch.Tensor) -> torch.Tensor:
    return values.chunk(size)[rank]


def _gathered(size: int, index: torch.Tensor) -> torch.Tensor:
    return torch.cat([_item(rank, _part(rank, size, index)) for rank in range(size)])


def _exchanged(rank: int, size: int, index: torch.Tensor) -> torch.Tensor:
    return torch.cat([_item(peer, _part(rank, size, index)) for peer in range(size)])


def _share(size: int) -> float:
    return (size - 1) / size


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "all_reduce",
            lambda arrays: dist.all_reduce(arrays.target),
            lambda size: 2 * _share(size),
            lambda rank, size, index: _total(size, index),
            is_sum=True,
            in_place=True,
        ),
        Operation(
            "broadcast",
            lambda arrays: dist.broadcast(arrays.target, 0),
            lambda size: 1.0,
            lambda rank, size, index: _item(0, index),
            in_place=True,
        ),
        Operation(
            "reduce",
            lambda arrays: dist.reduce(arrays.target, 0),
            lambda size: 1.0,
            lambda rank, size, index: _total(size, index) if rank == 0 else None,
            is_sum=True,
            in_place=True,
        ),
        Operation(
            "all_gather",
            lambda arrays: dist.all_gather_into_tensor(arrays.target, arrays.source),
            _share,
            lambda rank, size, index: _gathered(size, index),
            splits="source",
        ),
        Operation(
            "reduce_scatter",
            lambda arrays: dist.reduce_scatter_tensor(arrays.target, arrays.source),
            _share,
            lambda rank, size, index: _part(rank, size, _total(size, index)),
            is_sum=True,
            splits="target",
        ),
        Operation(
            "all_to_all",
            lambda arrays: dist.all_to_all_single(arrays.target, arrays.source),
            _share,
            lambda rank, size, index: _exchanged(rank, size, index),
            splits="none",
        ),
    )
}
NAMES = (*OPERATIONS, BARRIER)


def sizes_between(low: int, high: int, factor: int) -> list[int]:
    """Return the sizes to measure, in bytes: each is `factor` times the previous one."""
    sizes = []
    while low <= high:
        sizes.append(low)
        low *= factor
    return sizes


def measure(
    world: World, name: str, sizes: Sequence[int], dtype: torch.dtype, length: SizeLength
) -> list[SizePoint] | str:
    """Measure one operation; return its points, equal on every worker, or the error of a backend that lacks it.

    Args:
        sizes: Sizes in bytes, rounded down to split evenly among the workers; duplicates are dropped.

    Raises:
        WrongResultError: A result is wrong on some worker; raised on all workers.
    """
    if name == BARRIER:
        return [_measure_barrier(world, length)]
    operation = OPERATIONS[name]
    counts = sorted({_count(operation, size, world.size, dtype) for size in sizes})
    missing = _why_missing(world, operation, counts[0], dtype)
    return missing or [_measure_size(world, operation, count, dtype, length) for count in counts]


def _count(operation: Operation, size_bytes: int, workers: int, dtype: torch.dtype) -> int:
    """Return the number of elements of the whole array."""
    count = max(1, size_bytes // dtype.itemsize)
    return max(workers, count // workers * workers) if operation.splits else count


def _why_missing(world: World, operation: Operation, count: int, dtype: torch.dtype) -> str:
    """Return the backend's error if it does not support an operation; "" if it does."""
    error = ""
    try:
        _once(world, operation, count, dtype)
    except (RuntimeError, NotImplementedError, ValueError) as refusal:
        if is_lost_peer(refusal):
            raise
        error = first_line(refusal)
    return str(max(world.gather(error)))


def _once(world: World, operation: Operation, count: int, dtype: torch.dtype) -> bool:
    """Run the operation once on known numbers; return whether the result is correct."""
    index = torch.arange(count, device=world.device)
    values = (_summand if operation.is_sum else _item)(world.rank, index).to(dtype)
    expected = operation.expect(world.rank, world.size, index)
    arrays = _arrays(world, operation, values)
    operation.call(arrays)
    if expected is None:
        return True
    precision = torch.finfo(dtype).eps
    is_exact = not operation.is_sum or 2 * world.size <= 2 / precision
    tolerance = 0.0 if is_exact else world.size * precision
    return torch.allclose(arrays.target.double(), expected.double(), rtol=tolerance, atol=0.0)


def _arrays(world: World, operation: Operation, values: torch.Tensor) -> Arrays:
    """Return this worker's arrays for an operation on `values`, the whole array."""
    source = _part(world.rank, world.size, values).contiguous() if operation.splits == "source" else values
    if operation.in_place:
        return Arrays(source, source)
    parts = world.size if operation.splits == "target" else 1
    return Arrays(source, torch.full_like(values[: len(values) // parts], -1))


def _check(world: World, operation: Operation, count: int, dtype: torch.dtype) -> None:
    wrong = [rank for rank, right in enumerate(world.gather(_once(world, operation, count, dtype))) if not right]
    if wrong:
        raise WrongResultError(
            f"{operation.name} of {count * dtype.itemsize:,} bytes returned a wrong result on rank "
            f"{', '.join(map(str, wrong))} of {world.size} workers: memory, a network card or a driver is faulty, or "
            f"the workers have different versions of torch; to compare versions, run `lockstep doctor -H HOSTS`"
        )


def _measure_size(world: World, operation: Operation, count: int, dtype: torch.dtype, length: SizeLength) -> SizePoint:
    _check(world, operation, count, dtype)
    # Zeros do not grow when they are summed repeatedly.
    arrays = _arrays(world, operation, torch.zeros(count, dtype=dtype, device=world.device))
    times, calls = _time(world, lambda: operation.call(arrays), length)
    _check(world, operation, count, dtype)
    seconds, size_bytes = spread(times), count * dtype.itemsize
    bandwidth = size_bytes / seconds.median
    return SizePoint(size_bytes, seconds, len(times), calls, bandwidth, bandwidth * operation.bus_factor(world.size))


def _measure_barrier(world: World, length: SizeLength) -> SizePoint:
    def wait() -> None:
        dist.barrier(device_ids=None if _library(world) == GLOO else [world.device.index])

    times, calls = _time(world, wait, length)
    return SizePoint(0, spread(times), len(times), calls)


def _library(world: World) -> str:
    """Return the name of the backend for tensors on this worker's device."""
    own = accelerator.backend(world.device.type)
    return own if own in dist.get_backend_config() else GLOO


def _time(world: World, call: Callable[[], object], length: SizeLength) -> tuple[list[float], int]:
    """Return the seconds per call on the slowest worker for each repeat, and the number of calls per repeat."""
    _repeat(world, call, WARM_UP_CALLS)
    guess = max(world.gather(_repeat(world, call, WARM_UP_CALLS)))
    repeats = min(length.repeats, max(MIN_REPEATS, int(length.seconds / guess)))
    calls = min(MAX_CALLS, max(1, int(length.seconds / repeats / guess)))
    own = [_repeat(world, call, calls) for _ in range(repeats)]
    return [max(times) for times in zip(*world.gather(own), strict=True)], calls


def _repeat(world: World, call: Callable[[], object], calls: int) -> float:
    """Return this worker's seconds per call, from a barrier until its device has finished all calls."""
    dist.all_reduce(torch.zeros(1, device=world.device))
    accelerator.synchronize(world.device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    accelerator.synchronize(world.device)
    return (time.perf_counter() - start) / calls


def describe(world: World, dtype: str, sizes: Sequence[int], length: SizeLength) -> dict[str, Any]:
    """Return the settings of a measurement for its record."""
    return {
        "kind": "collectives",
        "workers": world.size,
        "nodes": 1 + max(world.gather(world.rank_info.node)),
        "backend": _library(world),
        "device": world.device.type,
        "dtype": dtype,
        "repeats": length.repeats,
        "seconds": length.seconds,
        "sizes_bytes": list(sizes),
    }


def recorded(records: Iterator[Mapping[str, Any]], settings: Mapping[str, Any]) -> set[str]:
    """Return the operations already recorded with these settings."""
    return {
        str(record["operation"])
        for record in records
        if all(record.get(name) == value for name, value in settings.items())
        and record.get("operation") in NAMES
        and ("points" in record or "unsupported" in record)
    }
