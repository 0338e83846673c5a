"""How many loader processes a worker gets: measured where that pays, else by rule.

Draws go by position, so the number of processes changes no result, and a job may find it anew on every machine. All
workers measure at the same time, as they will train, and agree after each number of processes on how to go on: a step
waits for its slowest worker, so the slowest one's rate counts.
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
WINDOW_SECONDS = 0.4  # for each number of processes, after their start
LIMIT_SECONDS = 3.0  # no further number is tried after this time
REQUEST_SECONDS = 0.03  # of one process for one batch, so that a window sees enough of them
ENOUGH_GAIN = 1.05
FEWEST_IMAGES = 5000  # a worker that reads fewer in the whole run is not worth the time


@dataclass(frozen=True)
class LoaderProcesses:
    """The loader processes of each worker, how that number came about ("": as given), and whether it was measured."""

    number: int
    reason: str = ""
    is_measured: bool = False

    def describe(self) -> list[str]:
        """A line for people, where the number was not theirs."""
        return [f"{count_processes(self.number)} per worker ({self.reason})"] if self.reason else []


def cores_of_worker(world: World) -> int:
    """The worker's share of the cores that may be used on its node."""
    return max(1, usable_cores() // world.place.local_size)


def usual_processes(config: TrainConfig, world: World, split: Split) -> LoaderProcesses:
    """The number of loader processes without measuring: as given, or one a core of the worker up to 8.

    The same on all workers, who must all call this.
    """
    if isinstance(split, MemorySplit):
        return LoaderProcesses(0)
    if config.data.loader_workers != "auto":
        return LoaderProcesses(config.data.loader_workers)
    cores = min(world.gather(cores_of_worker(world)))
    return LoaderProcesses(min(USUAL_MOST, cores), "one per core, not measured")


def choose_processes(
    config: TrainConfig, world: World, split: Split, images: int, batch: int, make_reader: Callable[[int], Reader]
) -> LoaderProcesses:
    """The number of loader processes for training, the same on all workers, who must all call this.

    It is the smallest within 5 % of the best rate. On one core of a computer without a GPU, making the batches in the
    worker itself (0) is tried, too.

    Args:
        images: How many training images a worker reads in the whole run.
        batch: How many it reads for one step.
        make_reader: Makes a reader of `split` with so many processes.

    Raises:
        DataError: As training would, of an image or the user's data set.
    """
    usual = usual_processes(config, world, split)
    if not usual.reason:
        return usual
    cores = min(world.gather(cores_of_worker(world)))
    tried = candidates(cores, world.device.type)
    if len(tried) == 1:
        return usual
    if images < FEWEST_IMAGES:
        return LoaderProcesses(usual.number, "one per core; the run is too short to measure")
    begun = time.monotonic()
    rates: dict[int, float] = {}
    samples = np.random.default_rng([config.seed, world.rank]).integers(len(split), size=1 << 15)
    parts = np.array_split(samples, len(tried))  # other images each time: none is in the page cache for that reason
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
        return LoaderProcesses(usual.number, f"one per core; {reason}, too slow to try more")
    return LoaderProcesses(number, reason, is_measured=True)


def candidates(cores: int, device: str) -> list[int]:
    """Numbers of processes to try on a worker's share of cores: powers of two, and all cores."""
    if cores == 1:
        return [1, 0] if device == "cpu" else [1]
    powers = [1 << exponent for exponent in range(cores.bit_length()) if 1 << exponent < cores]
    return [*powers, cores]


def is_flat(rates: dict[int, float]) -> bool:
    """Whether the last number of processes brought nothing over those before it."""
    *before, last = rates.values()
    return bool(before) and last < ENOUGH_GAIN * max(before)


def smallest_of_best(rates: dict[int, float]) -> int:
    """The smallest number of processes whose rate is within 5 % of the best."""
    best = max(rates.values())
    return min(processes for processes, rate in rates.items() if rate * ENOUGH_GAIN >= best)


def measure_rate(reader: Reader, plan: list[Indices], processes: int, seconds: float) -> float:
    """Images a second of a reader that nobody holds up, start-up excluded.

    Over `seconds` and at least a batch of each process, which may all come at the same moment, or to the plan's end.
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
    """How many images one process makes in `REQUEST_SECONDS`, by those after the first sample, up to `most`."""
    batches = reader.read(np.array_split(samples, len(samples)), 0)
    next(batches)
    start = time.perf_counter()
    for _ in batches:
        pass
    each = (time.perf_counter() - start) / (len(samples) - 1)
    return max(1, min(most, int(REQUEST_SECONDS / each)))


def count_processes(number: int) -> str:
    """A number of loader processes, in words."""
    return f"{number} loader process{'' if number == 1 else 'es'}"


def show_rate(rate: float) -> str:
    """Images a second, rounded for people."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
