"""The number of loader processes, and advice in one line when a worker waits for data."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil

from lockstep.config.schema import AugmentConfig, TrainConfig
from lockstep.data.sets import EncodedSplit, FileSplit, ImageData, MemorySplit, Split
from lockstep.errors import plural
from lockstep.world.devices import usable_cores
from lockstep.world.world import World

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


def network_of(path: Path) -> str:
    """Return the type of a path's network file system; "" if it is local."""
    whole = Path(os.path.realpath(path))  # unlike Path.resolve, also works for a link to itself
    mounts = [mount for mount in psutil.disk_partitions(all=True) if whole.is_relative_to(mount.mountpoint)]
    if not mounts:
        return ""
    # If several mounts share a mount point, the last is visible, such as NFS over an automounter.
    kind = max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype
    return kind if kind in NETWORK or kind.startswith("fuse.") else ""


def advise(config: TrainConfig, world: World, data: ImageData, processes: int) -> str:
    """Return advice in one line, based on how the training images are loaded."""
    split, cores = data.train, cores_of_worker(world)
    if isinstance(split, MemorySplit):
        return _advise_on_memory(config.augment)
    if processes < cores:
        return (
            f"raise -j from {processes} to {cores}, the number of cores of this worker; `lockstep study loading` "
            f"measures what helps"
        )
    if not isinstance(split, EncodedSplit):
        return (
            f"loading a batch of your data set with {count_processes(processes)} takes longer than a step: "
            f"make __getitem__ cheaper, cache what is the same in every epoch, or give each worker more cores"
        )
    if isinstance(split, FileSplit) and (network := network_of(Path(split.name(0)))):
        return (
            f"the images are on {network}, where each file costs a round trip to the server: pack the set into "
            f"large files with `lockstep data pack`, or copy it to a local disk"
        )
    if config.data.decode == "gpu":
        return (
            "reading files and decoding them on the GPU is the bottleneck: make the files smaller with "
            "`lockstep data pack`, or leave out --decode gpu"
        )
    return _advise_on_cores(world, data)


def _advise_on_memory(augment: AugmentConfig) -> str:
    flags = ("rotate", "zoom", "shear", "rand_augment", "trivial_augment")
    heavy = ", ".join(f"--{flag.replace('_', '-')}" for flag in flags if getattr(augment, flag))
    if heavy:
        return f"the images are in memory, and augmentation is the bottleneck: reduce {heavy}"
    return (
        "the images are in memory, and the model is so small that selecting and normalizing them takes longer than a "
        "step: raise -b for fewer batches"
    )


def _advise_on_cores(world: World, data: ImageData) -> str:
    """Return advice for decoding as the bottleneck: less work per image, or more cores."""
    spec, cores, device = data.input, cores_of_worker(world), world.device.type
    where, side = "shared with the model" if device == "cpu" else "all busy decoding", min(spec.height, spec.width)
    decoded_bytes = (len(data.train) + len(data.val)) * spec.channels * spec.height * spec.width
    ways = []
    if decoded_bytes <= psutil.virtual_memory().available // (2 * world.rank_info.local_size):
        size = f"{decoded_bytes / 1e9:.1f} GB"
        ways.append(f"--in-memory always --image-size {side} decodes once ({size}, without random crops)")
    ways.append(f"a smaller --image-size than {side}")
    if isinstance(data.train, FileSplit):
        ways.append("smaller files (`lockstep data pack`)")
    if device == "cuda":
        ways.append("--decode gpu, if they are JPEG")
    ways.append("more cores for each worker")
    return f"the CPU is the bottleneck ({plural(cores, 'core')} per worker, {where}): {'; '.join(ways)}"


class DataWait:
    """Gives advice if an epoch spends much time waiting for data; does not repeat the last advice.

    Args:
        advise: Returns the advice.
    """

    def __init__(self, advise: Callable[[], str]):
        self._advise = advise
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
        advice = self._advise()
        if advice == self._last_advice:
            return []
        self._last_advice = advice
        return [f"waiting for data took {100 * wait_seconds / epoch_seconds:.0f} % of the epoch: {advice}"]
