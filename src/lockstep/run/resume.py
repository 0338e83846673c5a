"""Choose the checkpoint that a run resumes from, check that it belongs to the same job, and restore it.

Loader, augmentation and dropout depend only on (seed, epoch, step), so repeated steps are identical. Their records are
removed first, so each appears once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from lockstep.config.schema import TrainConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.run.checkpoints import checkpoint_folder, checkpoint_format
from lockstep.run.checkpoints.checkpoint_folder import CheckpointFolder, Checkpoints, ShardWriter
from lockstep.run.checkpoints.legacy_format import is_old
from lockstep.run.checkpoints.memory_snapshots import NONE, bring_newest, open_snapshots, snapshots_of
from lockstep.run.checkpoints.sharded import WriteBarrier
from lockstep.run.checkpoints.snapshot import HostCopies, Snapshot
from lockstep.run.named_states import restore_states
from lockstep.run.position import Position
from lockstep.run.records.run_folder import RunFolder, newest_run_path
from lockstep.run.records.tracking_services import build_trackers
from lockstep.run.session import RunDescription, Session
from lockstep.run.stopping import build_stopping
from lockstep.world.world import World

P = TypeVar("P", bound=Position)
Found = tuple[Path | None, list[str]]
"""A checkpoint, and lines on newer, damaged ones."""


@dataclass(frozen=True)
class ResumePoint:
    """The state that a run resumes from.

    Args:
        state: A checkpoint or snapshot, the same path on every worker; None: a new run.
        again: Whether the workers were restarted and `state` is from this job.
        verified: This worker already verified the checksums.
        notes: Lines to print.
        checkpoint: `state`, or the checkpoint before it if it is a snapshot in memory.
    """

    state: Path | None = None
    again: bool = False
    verified: bool = False
    notes: tuple[str, ...] = ()
    checkpoint: Path | None = None

    def before(self, folder: RunFolder) -> RunFolder | None:
        """Return the run folder of the state if it is another one than `folder`."""
        if self.checkpoint is None or not checkpoint_folder.names_one(self.checkpoint):
            return None
        path = checkpoint_folder.run_folder_of(self.checkpoint)
        return RunFolder(path) if path != folder.path.resolve() else None


def find_resume_point(config: TrainConfig, world: World, own: Path | None = None) -> ResumePoint:
    """Find the state to resume from, equal on every worker.

    For a run folder or "auto" this is the newest undamaged checkpoint. Restarted workers resume from their own run's
    newest checkpoint or snapshot in memory; if there is none, the configuration applies.

    Args:
        own: The run folder that "auto" searches; None: the newest run of the same kind.

    Raises:
        CheckpointError: There is no checkpoint, the named one is damaged, or all are; raised on all workers.
    """
    folder = config.run.run_dir
    if world.rank_info.snapshots is not None and folder is None:
        raise ConfigError("--max-restarts needs --run-dir DIR: restarted workers find their run by its folder")
    return _find_newest(folder if world.rank_info.restart else None, world, partial(_find, config, own))


def _find_newest(run: Path | None, world: World, otherwise: Callable[[], Found]) -> ResumePoint:
    """Find the newest undamaged checkpoint or snapshot of a run, else what `otherwise` finds on rank 0. Collective."""

    def find() -> tuple[str | None, bool, list[str]]:
        found, notes = None, list[str]()
        if run is not None:
            try:
                found, notes = checkpoint_folder.newest_sound(run / "checkpoints")
            except CheckpointError as error:  # a snapshot may be usable
                notes = [str(error)]
        again = found is not None
        if found is None:
            found, more = otherwise()
            notes = more or notes
        return str(found) if found else None, again, notes

    path, again, notes = world.on_main(find)
    state = Path(path) if path else None
    memory = snapshots_of(run, world) if run is not None else None
    after = checkpoint_folder.step_of(state) if state and again else NONE
    if memory and (snapshot := bring_newest(memory, world, after)):
        return ResumePoint(snapshot, True, False, (*notes, "resuming from a snapshot in memory"), state)
    return ResumePoint(state, again, world.is_main, tuple(notes), state)


def _find(config: TrainConfig, own: Path | None) -> Found:
    if config.run.resume is None:
        return None, []
    named = Path(str(config.run.resume))
    if config.run.resume == "auto":
        run = own or config.run.run_dir or newest_run_path(config)
        return checkpoint_folder.newest_sound(run / "checkpoints") if run else (None, [])
    if is_old(named):
        return named, []
    if checkpoint_folder.names_one(named):
        checkpoint_format.verify(named)
        return named, []
    return checkpoint_folder.newest_sound(checkpoint_folder.locate(named).parent)


def restore(point: ResumePoint, described: RunDescription, kind: type[P]) -> tuple[P, Snapshot]:
    """Restore a run's states, and return its position, of a class, and what was stored. Collective.

    Raises:
        CheckpointError: The state is damaged, belongs to another job, or does not fit this one.
    """
    path, identity = point.state, described.identity
    assert path
    stored = checkpoint_format.load(path, point.verified, to_shard=True)
    different = [(key, stored.job.get(key), value) for key, value in identity.items() if stored.job.get(key) != value]
    if wrong := [f"{key} {found}, not {value}" for key, found, value in different]:
        fix = "use the same settings, or another run folder"
        raise CheckpointError(f"{path} belongs to another job: it was made with {'; '.join(wrong)}; {fix}")
    try:
        described.changes.restore(stored.job)
        restore_states(described.states, stored.model, stored.states)
        return kind.from_mapping(stored.progress), stored
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{path} does not fit this run: {' '.join(str(error).split())}") from None


def open_session(
    point: ResumePoint, config: TrainConfig, world: World, folder: RunFolder, described: RunDescription, progress: P
) -> Session[P]:
    """Begin this job's part of a run after its state was restored: create the folder, which must be locked. Collective.

    Raises:
        ConfigError: The folder holds another run's checkpoints, or cannot be written; raised on all workers.
    """
    checkpoints, before = Checkpoints(), point.before(folder)
    on_disk = in_memory = None

    def create() -> None:
        _check_unused(config, folder, point.state is None, described.how_to_resume)
        has_records = point.again  # those of the steps up to a snapshot
        folder.create(world, config if described.has_recipe else None, None if has_records else before)

    world.on_main(create)
    if described.is_sharded and world.size > 1:
        token = world.from_main(secrets.token_hex(4))
        _check_seen_by_all(folder.path / f".{token}", world)
        on_disk, in_memory = (WriteBarrier(world, token + kind) for kind in ("d", "m"))
    if world.is_main:
        checkpoints = CheckpointFolder(folder.checkpoints, config.run.keep, confirm=folder.confirm, barrier=on_disk)
    elif on_disk:
        checkpoints = ShardWriter(folder.checkpoints, True, on_disk)
    if before:
        progress.take_best({})  # the best checkpoint stays in the other folder
    session = Session(
        config,
        world,
        folder,
        described,
        progress,
        build_trackers(config, world, folder, progress, described.build_console),
        checkpoints,
        open_snapshots(config, world, folder.path, described.gathers_state, in_memory),
        HostCopies(world.device, world.rank_info.local_size),
        build_stopping(world),
    )
    session.go_back()
    if world.rank_info.restart:
        session.begin_generation()
    return session


def _check_seen_by_all(path: Path, world: World) -> None:
    """Check that all workers see a new file of rank 0, since all write into the run folder.

    Raises:
        ConfigError: Some do not; raised on all workers.
    """
    world.on_main(path.touch)
    unseen = [rank for rank, seen in enumerate(world.gather(path.exists())) if not seen]
    world.on_main(partial(path.unlink, missing_ok=True))
    if unseen:
        raise ConfigError(
            f"run folder {path.parent} of worker 0 is not seen by worker {unseen[0]}; each worker writes its part of a "
            f"sharded model there: choose a folder on a file system that all hosts share"
        )


def _check_unused(config: TrainConfig, folder: RunFolder, is_new: bool, how_to_resume: str) -> None:
    """Reject the folder of an earlier run for a new run.

    Raises:
        ConfigError: The folder holds another run's checkpoints.
    """
    if is_new and checkpoint_folder.newest(folder.checkpoints):
        fix = f"{how_to_resume}; or choose another folder"
        if config.run.start_epoch is not None:
            fix = "--start-epoch starts a new run: choose another folder, or leave out --start-epoch"
        raise ConfigError(f"run folder {folder.path} contains checkpoints of an earlier run; {fix}")
