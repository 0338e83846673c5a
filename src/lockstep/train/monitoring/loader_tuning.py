"""Choose the number of loader processes per worker: measured if the run is long enough, else one per core, at most 8.

Random draws depend on the position only, so the number of processes does not change results, and each machine may
measure its own. All workers measure at the same time, as in training, and agree on each next step. A training step
waits for its slowest worker, so the slowest rate counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np

from lockstep.config.schema import TrainConfig
from lockstep.data.augment.random_draws import Indices
from lockstep.data.pipeline.readers import Reader
from lockstep.data.sets import MemorySplit, Split
from lockstep.world.world import World, usable_cores

USUAL_MOST = 8
WINDOW_SECONDS = 0.4  # per number of processes, after their start
LIMIT_SECONDS = 3.0  # no further number is tried after this time
REQUEST_SECONDS = 0.03  # per batch and process, so that a window covers enough batches
ENOUGH_GAIN = 1.05
FEWEST_IMAGES = 5000  # per worker and run; below this, measuring takes too long


@dataclass(frozen=True)
class LoaderProcesses:
    """The number of loader processes per worker, the reason ("": set by the user), and whether it was measured."""

    number: int
    reason: str = ""
    is_measured: bool = False

    def describe(self) -> list[str]:
        """Return a line to print, unless the user set the number."""
        return [f"{count_processes(self.number)} per worker ({self.reason})"] if self.reason else []


def cores_of_worker(world: World) -> int:
    """Return the worker's share of the usable cores of its node."""
    return max(1, usable_cores() // world.rank_info.local_size)


def usual_processes(config: TrainConfig, world: World, split: Split) -> LoaderProcesses:
    """Return the number of loader processes without measuring: as configured, or one per core, at most 8.

    Collective; equal on all workers.
    """
    if isinstance(split, MemorySplit):
        return LoaderProcesses(0)
    if config.data.loader_workers != "auto":
        return LoaderProcesses(config.data.loader_workers)
    cores = min(world.gather(cores_of_worker(world)))
    return LoaderProcesses(min(USUAL_MOST, cores), "from the number of cores, not measured")


def choose_processes(
    config: TrainConfig, world: World, split: Split, images: int, batch: int, make_reader: Callable[[int], Reader]
) -> LoaderProcesses:
    """Return the number of loader processes for training. Collective; equal on all workers.

    This is the smallest number within 5 % of the best rate. With one core and no GPU, loading in the worker itself (0)
    is also tried.

    Args:
        images: Training images that a worker reads in the whole run.
        batch: Images that a worker reads per step.
        make_reader: Creates a reader of `split` with a number of processes.

    Raises:
        DataError: An image cannot be read, or an item of the user's data set is invalid.
    """
    usual = usual_processes(config, world, split)
    if not usual.reason:
        return usual
    cores = min(world.gather(cores_of_worker(world)))
    tried = candidates(cores, world.device.type)
    if len(tried) == 1:
        return usual
    if images < FEWEST_IMAGES:
        return LoaderProcesses(usual.number, "from the number of cores; the run is too short to measure")
    begun = time.monotonic()
    rates: dict[int, float] = {}
    samples = np.random.default_rng([config.seed, world.rank]).integers(len(split), size=1 << 15)
    parts = np.array_split(
        samples, len(tried)
    )  # different images each time, so that none is cached by an earlier window
    size, most = 1, max(1, min(batch, len(parts[-1]) // (8 * cores)))
    for processes, part in zip(tried, parts, strict=True):
        with closing(make_reader(processes)) as reader:
            if not rates:
                size = _request_size(reader, part[:3], most)
            world.barrier()
            rate = measure_rate(reader, np.array_split(part, max(1, len(part) // size)), processes, WINDOW_SECONDS)
        gathered = world.gather([rate, time.monotonic() - begun])
        rates[processes] = world.size * min(rate for rate, _ in gathered)
        if is_flat(rates):
            break
        if max(seconds for _, seconds in gathered) > LIMIT_SECONDS:
            break
    number = smallest_of_best(rates)
    over = f" over {world.size} workers" if world.size > 1 else ""
    figures = ", ".join(f"{processes}: {show_rate(rate)}" for processes, rate in rates.items())
    reason = f"measured{over}: {figures} images/s"
    if number < usual.number and len(rates) < len(tried) and not is_flat(rates):
        return LoaderProcesses(usual.number, f"from the number of cores; {reason}, too slow to try more")
    return LoaderProcesses(number, reason, is_measured=True)


def candidates(cores: int, device: str) -> list[int]:
    """Return the numbers of processes to try for a number of cores: powers of two, and all cores."""
    if cores == 1:
        return [1, 0] if device == "cpu" else [1]
    powers = [1 << exponent for exponent in range(cores.bit_length()) if 1 << exponent < cores]
    return [*powers, cores]


def is_flat(rates: dict[int, float]) -> bool:
    """Return whether the last number of processes was not faster than the earlier ones."""
    *before, last = rates.values()
    return bool(before) and last < ENOUGH_GAIN * max(before)


def smallest_of_best(rates: dict[int, float]) -> int:
    """Return the smallest number of processes whose rate is within 5 % of the best."""
    best = max(rates.values())
    return min(processes for processes, rate in rates.items() if rate * ENOUGH_GAIN >= best)


def measure_rate(reader: Reader, plan: list[Indices], processes: int, seconds: float) -> float:
    """Measure the images per second of a reader without a consumer, excluding start-up.

    Measure at least `seconds` and one batch per process (these may arrive together), or until the plan ends.
    """
    turn = max(1, processes)
    batches = reader.read(plan, 0)
    for _ in islice(batches, turn):
        pass
    start, images = time.perf_counter(), 0
    for number, batch in enumerate(batches, start=1):
        images += len(batch.labels)
        if number >= turn and time.perf_counter() - start >= seconds:
            break
    return images / (time.perf_counter() - start)


def _request_size(reader: Reader, samples: Indices, most: int) -> int:
    """Return how many images one process loads in `REQUEST_SECONDS`, at most `most`, excluding the first sample."""
    batches = reader.read(np.array_split(samples, len(samples)), 0)
    next(batches)
    start = time.perf_counter()
    for _ in batches:
        pass
    each = (time.perf_counter() - start) / (len(samples) - 1)
    return max(1, min(most, int(REQUEST_SECONDS / each)))


def count_processes(number: int) -> str:
    """Format a number of loader processes."""
    return f"{number} loader process{'' if number == 1 else 'es'}"


def show_rate(rate: float) -> str:
    """Format a rate in images per second."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
