"""The number of loader processes, and advice in one line when a worker waits for data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from lockstep.config.schema import AugmentConfig, TrainConfig
from lockstep.data.sets import EncodedSplit, FileSplit, ImageData, MemorySplit, Split
from lockstep.errors import plural
from lockstep.world.world import World, usable_cores

USUAL_MOST = 8


def count_processes(number: int) -> str:
    """Format a number of loader processes."""
    return f"{number} loader process{'' if number == 1 else 'es'}"


def cores_of_worker(world: World) -> int:
    """Return the worker's share of the usable cores of its node."""
    return max(1, usable_cores() // world.rank_info.local_size)


def choose_processes(config: TrainConfig, world: World, split: Split) -> int:
    """Return the number of loader processes per worker: as configured, or one per core, at most 8.

    Collective; equal on all workers. `lockstep study loading` measures which number helps.
    """
    if isinstance(split, MemorySplit):
        return 0
    if config.data.loader_workers != "auto":
        return config.data.loader_workers
    cores: int = min(world.gather(cores_of_worker(world)))
    return min(USUAL_MOST, cores)


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
    processes: int
    cores: int
    device: str
    side: int
    augment: AugmentConfig
    decode: Literal["cpu", "gpu"] = "cpu"
    network: str = ""
    decoded_bytes: int = 0
    room_bytes: int = 0


def describe_loading(config: TrainConfig, world: World, data: ImageData, processes: int) -> LoadingFacts:
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
    if processes < cores:
        return (
            f"raise -j from {processes} to {cores}, the number of cores of this worker; `lockstep study loading` "
            f"measures what helps"
        )
    if loading.kind == "user":
        return (
            f"loading a batch of your data set with {count_processes(processes)} takes longer than a step: "
            f"make __getitem__ cheaper, cache what is the same in every epoch, or give each worker more cores"
        )
    if loading.network:
        return (
            f"the images are on {loading.network}, where each file costs a round trip to the server: pack the set into "
            f"large files with `lockstep data pack`, or copy it to a local disk"
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
