"""Snapshots in memory: the state after one of the last steps, kept on every host for restarted workers.

The folder is in memory and outlives the workers (`lockstep.launch.node.job_folders`). One worker per host writes to
it, in checkpoint format. If a host dies, its copy is lost; a host that joins receives a copy from another one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from lockstep.config.run_paths import name_of
from lockstep.config.schema import TrainConfig
from lockstep.errors import CheckpointError
from lockstep.files.atomic import partial_of
from lockstep.run.checkpoints import checkpoint_folder, checkpoint_format
from lockstep.run.checkpoints.checkpoint_folder import CheckpointFolder, Checkpoints, ShardWriter
from lockstep.run.checkpoints.sharded import WriteBarrier
from lockstep.world.world import World

CHUNK_BYTES = 64 << 20
NONE = -1
WRITER = "writer"  # in a snapshot's description: the rank that wrote its own state, if it may differ from rank 0's


class SnapshotFolder(CheckpointFolder):
    """The newest snapshot, in memory; the previous one is removed once the new one is complete."""

    noun = "snapshot"

    def __init__(self, folder: Path, barrier: WriteBarrier | None = None):
        super().__init__(folder, keep=1, durable=False, barrier=barrier)
        self._has_reported = False

    def _report(self, line: str) -> None:
        """Report only the first failure: later snapshots will not fit into memory either."""
        if not self._has_reported:
            self._warn(f"{line}; a restart will resume from a checkpoint")
        self._has_reported = True


def snapshots_of(run: Path, world: World) -> Path | None:
    """Return this host's folder for the snapshots of a run, of which a program may have several; None: keep none."""
    memory = world.rank_info.snapshots
    return memory / hashlib.sha256(os.path.abspath(run).encode()).hexdigest()[:16] if memory else None


def open_snapshots(
    config: TrainConfig, world: World, run: Path, gathers_state: bool, barrier: WriteBarrier | None = None
) -> Checkpoints:
    """Return the snapshot folder of the worker that writes on its host, else a no-op.

    Args:
        gathers_state: Only rank 0 has the whole state, so only its host has snapshots.
        barrier: If the state is sharded over the workers. If they are on several hosts, there are no snapshots.
    """
    memory = snapshots_of(run, world) if snapshot_interval(config, world) else None
    if memory is None or (barrier and world.rank_info.local_size < world.size):
        return Checkpoints()
    if barrier and not world.is_main:
        return ShardWriter(memory, False, barrier)
    writes = world.is_main if gathers_state else world.rank_info.local_rank == 0
    return SnapshotFolder(memory, barrier) if writes else Checkpoints()


def snapshot_interval(config: TrainConfig, world: World) -> int:
    """Return the number of steps between two snapshots; 0 if none are kept."""
    if world.rank_info.snapshots is None:
        return 0
    return config.run.log_every if config.run.snapshot_steps is None else config.run.snapshot_steps


def bring_newest(folder: Path, world: World, after: int) -> Path | None:
    """Copy the newest undamaged snapshot of any host to all hosts, if its step is later than `after`.

    Of the same step, the snapshot of the lowest rank counts: that of rank 0, unless its host is lost. Return its path;
    None if it does not exist or a host has no room for it.
    """
    own = [NONE, 0]
    if world.rank_info.local_rank == 0:
        with suppress(CheckpointError):  # all are damaged; another host's snapshot or a checkpoint may be usable
            newest, _ = checkpoint_folder.newest_sound(folder)
            if newest:
                writer = checkpoint_format.read_entry(newest, "about").get(WRITER, 0)
                own = [checkpoint_folder.step_of(newest), -int(writer)]
    found = world.gather(own)
    latest = max(found)
    if latest[0] <= after:
        return None
    snapshot = folder / name_of(latest[0])
    takes = world.rank_info.local_rank == 0 and own != latest
    if any(world.gather(takes)) and not _copy(snapshot, found.index(latest), world, takes):
        return None
    return snapshot


def _copy(snapshot: Path, holder: int, world: World, takes: bool) -> bool:
    """Send the holder's snapshot to the workers with `takes`. Return whether all succeeded; equal on all workers."""
    files = {path.name: path.stat().st_size for path in snapshot.iterdir()} if world.rank == holder else {}
    files = world.gather(files)[holder]
    partial = partial_of(snapshot)
    if not all(world.gather(not takes or _make_room(partial, sum(files.values())))):
        return False
    problem = ""
    for name, size in sorted(files.items()):
        with ExitStack() as stack:
            source = stack.enter_context((snapshot / name).open("rb")) if world.rank == holder else None
            target = stack.enter_context((partial / name).open("wb")) if takes else None
            for start in range(0, size, CHUNK_BYTES):
                chunk = np.empty(min(CHUNK_BYTES, size - start), dtype=np.uint8)
                if source:
                    source.readinto(chunk)
                world.broadcast_(chunk, holder)
                if target and not problem:
                    try:
                        target.write(chunk.data)
                        target.flush()
                    except OSError as error:  # continue: the broadcasts are collective
                        problem = str(error)
    if takes and not problem:
        shutil.rmtree(snapshot, ignore_errors=True)
        partial.rename(snapshot)
    return not any(world.gather(problem))


def _make_room(partial: Path, size_bytes: int) -> bool:
    """Create an empty folder. Return whether its file system has enough free space."""
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return shutil.disk_usage(partial).free > size_bytes
    except OSError:
        return False
