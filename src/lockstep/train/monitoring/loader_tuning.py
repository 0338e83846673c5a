"""Choose the number of loader processes per worker: measured if the run is long enough, else one per core, at most 8.

Random draws depend on the position only, so the number of processes does not change results, and each machine may
measure its own. All workers measure at the same time, as in training, and agree on each next step. A training step
waits for its slowest worker, so the slowest rate counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import psutil

from lockstep.config.schema import AugmentConfig, TrainConfig
from lockstep.data.augment.random_draws import Indices
from lockstep.data.pipeline.readers import Reader
from lockstep.data.sets import EncodedSplit, FileSplit, ImageData, MemorySplit, Split
from lockstep.errors import plural
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


MUCH = 0.1  # fraction of an epoch's time above which advice is printed
LITTLE_SECONDS = 0.5  # per epoch; no advice below this
NETWORK = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "panfs", "wekafs", "afs"})


@dataclass(frozen=True)
class LoadingFacts:
    """How a worker loads training images.

    `kind`: images are in memory, in separate files, in a packed set, or in a user-defined data set. `cores`: cores of
    this worker. `network`: type of the network file system of the files, if any. `decoded_bytes`: size of all images in
    memory. `room_bytes`: memory available to each worker.
    """

    kind: Literal["memory", "files", "packed", "user"]
    processes: LoaderProcesses
    cores: int
    device: str
    side: int
    augment: AugmentConfig
    decode: Literal["cpu", "gpu"] = "cpu"
    network: str = ""
    decoded_bytes: int = 0
    room_bytes: int = 0


def describe_loading(config: TrainConfig, world: World, data: ImageData, processes: LoaderProcesses) -> LoadingFacts:
    """Collect the facts for the advice."""
    split, spec = data.train, data.input
    kind: Literal["memory", "files", "packed", "user"] = "user"
    if isinstance(split, MemorySplit):
        kind = "memory"
    elif isinstance(split, EncodedSplit):
        kind = "files" if isinstance(split, FileSplit) else "packed"
    return LoadingFacts(
        kind=kind,
        processes=processes,
        cores=cores_of_worker(world),
        device=world.device.type,
        side=min(spec.height, spec.width),
        augment=config.augment,
        decode=config.data.decode,
        network=network_of(Path(split.name(0))) if isinstance(split, FileSplit) else "",
        decoded_bytes=(len(data.train) + len(data.val)) * spec.channels * spec.height * spec.width,
        room_bytes=psutil.virtual_memory().available // (2 * world.rank_info.local_size),
    )


def network_of(path: Path) -> str:
    """Return the type of a path's network file system; "" if it is local."""
    whole = Path(os.path.realpath(path))  # unlike Path.resolve, also works for a link to itself
    mounts = [mount for mount in psutil.disk_partitions(all=True) if whole.is_relative_to(mount.mountpoint)]
    if not mounts:
        return ""
    # If several mounts share a mount point, the last is visible, such as NFS over an automounter.
    kind = max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype
    return kind if kind in NETWORK or kind.startswith("fuse.") else ""


def advise(loading: LoadingFacts) -> str:
    """Return advice in one line."""
    processes, cores = loading.processes, loading.cores
    if loading.kind == "memory":
        return _advise_on_memory(loading)
    if processes.number < cores and not processes.is_measured:
        hint = "" if processes.reason else "; -j auto measures what helps"
        return f"raise -j from {processes.number} to {cores}, the number of cores of this worker{hint}"
    if loading.kind == "user":
        return (
            f"loading a batch of your data set with {count_processes(processes.number)} takes longer than a step: "
            f"make __getitem__ cheaper, cache what is the same in every epoch, or give each worker more cores"
        )
    if loading.network:
        return (
            f"the images are on {loading.network}, where each file costs a round trip to the server: pack the set into "
            f"large files with `lockstep data pack`, or copy it to a local disk"
        )
    if 0 < processes.number < cores and loading.kind == "files":
        return (
            f"more than {count_processes(processes.number)} were no faster when measured, so storage is the "
            f"bottleneck: pack the set into large files with `lockstep data pack`, or copy it to a faster disk"
        )
    return _advise_on_cores(loading)


def _advise_on_memory(loading: LoadingFacts) -> str:
    augment = loading.augment
    flags = ("rotate", "zoom", "shear", "rand_augment", "trivial_augment")
    heavy = ", ".join(f"--{flag.replace('_', '-')}" for flag in flags if getattr(augment, flag))
    if heavy:
        return f"the images are in memory, and augmentation is the bottleneck: reduce {heavy}"
    return (
        "the images are in memory, and the model is so small that selecting and normalizing them takes longer than a "
        "step: raise -b for fewer batches"
    )


def _advise_on_cores(loading: LoadingFacts) -> str:
    """Return advice for decoding as the bottleneck: less work per image, or more cores."""
    if loading.decode == "gpu":
        return (
            "reading files and decoding them on the GPU is the bottleneck: make the files smaller with "
            "`lockstep data pack`, or leave out --decode gpu"
        )
    where = "shared with the model" if loading.device == "cpu" else "all busy decoding"
    ways = []
    if loading.decoded_bytes <= loading.room_bytes:
        size = f"{loading.decoded_bytes / 1e9:.1f} GB"
        ways.append(f"--in-memory always --image-size {loading.side} decodes once ({size}, without random crops)")
    ways.append(f"a smaller --image-size than {loading.side}")
    if loading.kind == "files":
        ways.append("smaller files (`lockstep data pack`)")
    if loading.device == "cuda":
        ways.append("--decode gpu, if they are JPEG")
    ways.append("more cores for each worker")
    return f"the CPU is the bottleneck ({plural(loading.cores, 'core')} per worker, {where}): {'; '.join(ways)}"


class DataWait:
    """Gives advice if an epoch spends much time waiting for data; does not repeat the last advice."""

    def __init__(self, loading: LoadingFacts):
        self._loading = loading
        self._has_started, self._start_seconds = False, 0.0
        self._last_advice = ""

    def first_batch(self, seconds: float) -> None:
        """Record how long an epoch's first batch took; a session's first batch includes starting the processes."""
        if not self._has_started:
            self._has_started, self._start_seconds = True, seconds

    def lines(self, wait_seconds: float, epoch_seconds: float) -> list[str]:
        """Return lines to print after an epoch of `epoch_seconds`, including `wait_seconds` of waiting."""
        start, self._start_seconds = self._start_seconds, 0.0
        if wait_seconds <= max(LITTLE_SECONDS, MUCH * epoch_seconds):
            return []
        if wait_seconds - start <= MUCH * (epoch_seconds - start):
            return [f"waiting for data took {wait_seconds:.1f} s, {start:.1f} s of it for the session's first batch"]
        advice = advise(self._loading)
        if advice == self._last_advice:
            return []
        self._last_advice = advice
        return [f"waiting for data took {100 * wait_seconds / epoch_seconds:.0f} % of the epoch: {advice}"]
