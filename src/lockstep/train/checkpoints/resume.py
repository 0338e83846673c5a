"""Going on from a run's checkpoint: which one, whether it is of the same job, and its state into the run's parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config.schema import TrainConfig
from lockstep.data.sets import ImageData
from lockstep.errors import CheckpointError, ConfigError
from lockstep.train.checkpoints import checkpoint_folder, checkpoint_format
from lockstep.train.checkpoints.checkpoint_folder import CheckpointFolder, Checkpoints, go_back
from lockstep.train.checkpoints.legacy_format import is_old
from lockstep.train.checkpoints.legacy_resume import begin_at, take_over
from lockstep.train.checkpoints.memory_snapshots import NONE, bring_newest
from lockstep.train.checkpoints.run_lock import HeldRun
from lockstep.train.job_parts import Optimization
from lockstep.train.optim.batch_plan import Batching
from lockstep.train.optim.build import load_keeping_flags
from lockstep.train.progress import Progress
from lockstep.train.run_folder import RunFolder, newest_run_path
from lockstep.world.world import World


def identify(config: TrainConfig, data: ImageData, batching: Batching, optimizer: str | None = None) -> dict[str, Any]:
    """What a run and its continuation must share, each under the flag that sets it.

    Args:
        optimizer: The name of one that is not of the configuration.
    """
    return {
        "DATASET": data.name,
        "number of training samples": len(data.train),
        "--arch": config.model.arch,
        "--optimizer": optimizer or config.optim.optimizer,
        "--freeze": list(config.model.freeze),
        "--ema-decay": config.model.ema_decay,
        "--seed": config.seed,
        "--global-batch-size": batching.global_batch,
        "--drop-last": config.data.drop_last,
    }


@dataclass(frozen=True)
class ResumePoint:
    """What a run goes on from.

    Args:
        state: A checkpoint or a snapshot, the same path on every worker; None: it begins anew.
        again: This job's workers have been started before, and this is their own state.
        verified: On this worker the files were compared with their checksums just now.
        notes: What to say of it.
        is_snapshot: It is in memory, and no part of a run folder.
        checkpoint: The one that a snapshot follows.
    """

    state: Path | None = None
    again: bool = False
    verified: bool = False
    notes: tuple[str, ...] = ()
    is_snapshot: bool = False
    checkpoint: Path | None = None

    @property
    def run(self) -> Path | None:
        """The run folder that the state belongs to; None: a new one."""
        path = self.checkpoint if self.is_snapshot else self.state
        return checkpoint_folder.run_folder_of(path) if path and checkpoint_folder.names_one(path) else None


@dataclass(frozen=True)
class Beginning:
    """Where a run begins.

    Args:
        progress: How far it has come already.
        checkpoints: Its own; they write on rank 0 alone.
        notes: What to say of it.
        before: Another run folder that it goes on from.
    """

    progress: Progress
    checkpoints: Checkpoints
    notes: list[str]
    before: RunFolder | None


def begin(
    point: ResumePoint,
    config: TrainConfig,
    world: World,
    held: HeldRun,
    identity: dict[str, Any],
    weights: nn.Module,
    optim: Optimization,
    steps_per_epoch: int,
) -> Beginning:
    """Put the state that a run goes on from, if any, into its parts, and begin its folder, which is held.

    Raises:
        CheckpointError: The state is damaged, or belongs to another job.
        ConfigError: The folder holds another run's checkpoints, or --start-epoch is past the end.
    """
    progress, notes = Progress(), list[str]()
    if point.state is not None and world.from_main(is_old(point.state)):
        progress, notes = take_over(point.state, config, weights, optim.optimizer, steps_per_epoch)
        optim.precision.refresh()
        optim.average.begin()
        point = ResumePoint()  # its run has no folder of ours
    elif point.state is not None:
        progress = restore(point, identity, weights, optim)
        notes = ["resuming from a snapshot in memory"] * point.is_snapshot
    begun = progress if point.again else begin_at(progress, config, steps_per_epoch)
    if begun is not progress:
        progress, point = begun, ResumePoint()
    checkpoints = _begin_folder(config, world, held, is_new=point.state is None)
    before = None
    if point.run is not None and point.run != held.folder.path.resolve():
        before = RunFolder(point.run)
        progress.forget_best()  # the best of the other folder stays there
    go_back(checkpoints, progress, world)
    return Beginning(progress, checkpoints, notes, before)


def find_resume_point(config: TrainConfig, world: World, own: Path | None = None) -> ResumePoint:
    """What to go on from, the same on every worker.

    Where a run was named, or none, that is the newest checkpoint that is sound. Workers that are started anew go on
    from their own run's newest state, be it a checkpoint or a snapshot in memory, and as configured if there is none.

    Args:
        own: The run's folder, where "auto" looks; None: in the newest run of the same kind.

    Raises:
        CheckpointError: There is none, the one that was named is damaged, or all are.
    """
    memory = world.place.snapshots
    if memory is not None and config.run.run_dir is None:
        raise ConfigError("--max-restarts needs --run-dir DIR: restarted workers find their run by its folder")
    found: Path | None = None
    again, notes = False, list[str]()
    if world.is_main and world.place.restart:
        found, notes = _find_own(config)
        again = found is not None
    if world.is_main and found is None and config.run.resume:
        found, notes = _find(config, own)
    path, again = world.from_main([str(found) if found else None, again])
    state = Path(path) if path else None
    point = ResumePoint(state, again, verified=world.is_main, notes=tuple(notes))
    if memory is None or not world.place.restart:
        return point
    snapshot = bring_newest(memory, world, after=checkpoint_folder.step_of(state) if state and again else NONE)
    if snapshot is None:
        return point
    return replace(point, state=snapshot, again=True, verified=False, is_snapshot=True, checkpoint=state)


def _find_own(config: TrainConfig) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that this job has written itself, before its workers were started anew."""
    if config.run.run_dir is None:
        return None, []
    try:
        return _newest_sound(config.run.run_dir / "checkpoints")
    except CheckpointError as error:  # a snapshot may do
        return None, [str(error)]


def _find(config: TrainConfig, own: Path | None) -> tuple[Path | None, list[str]]:
    named = Path(str(config.run.resume))
    if config.run.resume == "auto":
        run = own or config.run.run_dir or newest_run_path(config)
        return _newest_sound(run / "checkpoints") if run else (None, [])
    if is_old(named):
        return named, []
    if checkpoint_folder.names_one(named):
        checkpoint_format.verify(named)
        return named, []
    return _newest_sound(checkpoint_folder.locate(named).parent)


def _newest_sound(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint there that is sound, and what to say of newer ones."""
    found, problems = checkpoint_folder.newest_sound(folder)
    return found, [f"{problem}; resuming from {found}" for problem in problems]


def _begin_folder(config: TrainConfig, world: World, held: HeldRun, is_new: bool) -> Checkpoints:
    """Write what the run was started with, on rank 0, which alone writes checkpoints.

    Raises:
        ConfigError: The folder holds another run's checkpoints.
    """
    folder = held.folder
    if not world.is_main:
        return Checkpoints()
    check_unused(config, folder, is_new)
    folder.create(config, world)
    return CheckpointFolder(folder.checkpoints, config.run.keep, confirm=held.confirm)


def check_unused(config: TrainConfig, folder: RunFolder, is_new: bool) -> None:
    """Refuse the folder of an earlier run for a new one.

    Raises:
        ConfigError: The folder holds another run's checkpoints.
    """
    if is_new and checkpoint_folder.newest(folder.checkpoints):
        fix = "add --resume auto to continue it, or choose another folder"
        if config.run.start_epoch is not None:
            fix = "--start-epoch starts a new run: choose another folder, or leave out --start-epoch"
        raise ConfigError(f"--run-dir {folder.path} contains checkpoints of an earlier run; {fix}")


def restore(point: ResumePoint, identity: dict[str, Any], weights: nn.Module, optim: Optimization) -> Progress:
    """Put the state that a run goes on from into its parts, and return how far it had come."""
    path, strategy, precision = point.state, optim.strategy, optim.precision
    assert path
    snapshot = checkpoint_format.load(path, point.verified)
    made_with = {"--freeze": [], **snapshot.job}  # which older checkpoints do not name
    different = {key: (made_with.get(key), value) for key, value in identity.items()}
    wrong = [f"{key} {was}, not {now}" for key, (was, now) in different.items() if was != now]
    if wrong:
        raise CheckpointError(f"{path} belongs to another job: it was made with {'; '.join(wrong)}")
    try:
        weights.load_state_dict(snapshot.model)
        precision.refresh()
        optim.average.load_state_dict(snapshot.average)
        load_keeping_flags(optim.optimizer, snapshot.optimizer, optim.kept)
        strategy.load_state_dict(snapshot.strategy)
        if snapshot.precision.get("name") == precision.name:
            precision.load_state_dict(snapshot.precision)
            strategy.rescale(precision.loss_scale / snapshot.precision.get("scale", precision.loss_scale))
        else:
            strategy.forget_gradients()
        return Progress.from_mapping(snapshot.progress)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from None
