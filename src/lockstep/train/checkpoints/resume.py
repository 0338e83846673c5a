"""Resume a run: choose the checkpoint, check that it belongs to the same job, and restore its state.

`rewind` restores an earlier state within the process, on all workers, and repeats the steps since then. Loader,
augmentation and dropout depend only on (seed, epoch, step), so the repeated steps are identical. Their records are
removed first, so each appears once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config.schema import TrainConfig
from lockstep.data.sets import ImageData
from lockstep.errors import CheckpointError, ConfigError, NonFiniteLossError
from lockstep.train.checkpoints import checkpoint_folder, checkpoint_format
from lockstep.train.checkpoints.checkpoint_folder import CheckpointFolder, Checkpoints
from lockstep.train.checkpoints.legacy_format import is_old, load_weights, read
from lockstep.train.checkpoints.memory_snapshots import NONE, bring_newest
from lockstep.train.job import Job, Optimization, RewindError, Saving
from lockstep.train.optim.build import load_keeping_flags
from lockstep.train.optim.schedule import Batching
from lockstep.train.progress import Progress
from lockstep.train.run_folder import HeldRun, RunFolder, newest_run_path
from lockstep.train.trackers import ALWAYS
from lockstep.world.world import World


def take_over(path: Path, config: TrainConfig, model: nn.Module, steps_per_epoch: int) -> tuple[Progress, list[str]]:
    """Restore an older script's weights and its number of finished epochs; the optimizer starts without state.

    Returns:
        The progress, and lines to print on what was restored and what was not.

    Raises:
        CheckpointError: The file cannot be read, or its weights do not fit the model.
    """
    old = read(path)
    load_weights(old, model, config.model.arch)
    epochs = old.epochs or 0
    best = f", best top-1 {100 * old.top1:.2f} %" if old.top1 is not None else ""
    lines = [f"weights from {path}: {epochs} epochs finished{best}"]
    if old.epochs is None:
        lines[0] = f"weights from {path}, which does not record the number of finished epochs; add --start-epoch N"
    if epochs >= config.epochs and config.run.start_epoch is None:
        lines.append(f"no epochs left to train (--epochs {config.epochs}): evaluating the weights as they are")
    lines.append("the optimizer starts without the file's state, momentum at zero")
    return Progress(step=epochs * steps_per_epoch), lines


def begin_at(progress: Progress, config: TrainConfig, steps_per_epoch: int) -> Progress:
    """Return the progress at --start-epoch, or the same object if that changes nothing.

    Raises:
        ConfigError: The run ends before that epoch.
    """
    start = config.run.start_epoch
    if start is None or start * steps_per_epoch == progress.step:
        return progress
    if start > config.epochs:
        raise ConfigError(f"--start-epoch {start} is past the last epoch, --epochs {config.epochs}")
    return Progress(step=start * steps_per_epoch, seconds=progress.seconds)


def identify(config: TrainConfig, data: ImageData, batching: Batching, optimizer: str | None = None) -> dict[str, Any]:
    """Return the settings that must be equal in a run and its continuation, by flag.

    Args:
        optimizer: The name of a custom optimizer.
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


def go_back(checkpoints: Checkpoints, progress: Progress, world: World) -> None:
    """Remove checkpoints of steps after the restored one. Call it on all workers, each with its own `checkpoints`.

    Resets the best evaluation if its checkpoint is missing, for example because it was damaged.
    """
    checkpoints.forget_after(progress.step, progress.best_step)
    if not world.from_main(checkpoints.has_best):
        progress.forget_best()


@dataclass(frozen=True)
class ResumePoint:
    """The state that a run resumes from.

    Args:
        state: A checkpoint or snapshot, the same path on every worker; None: a new run.
        again: Whether the workers were restarted and `state` is from this job.
        verified: This worker already verified the checksums.
        notes: Lines to print.
        is_snapshot: The state is in memory, not in a run folder.
        checkpoint: The checkpoint before the snapshot.
    """

    state: Path | None = None
    again: bool = False
    verified: bool = False
    notes: tuple[str, ...] = ()
    is_snapshot: bool = False
    checkpoint: Path | None = None

    @property
    def run(self) -> Path | None:
        """The run folder of the state; None: a new one."""
        path = self.checkpoint if self.is_snapshot else self.state
        return checkpoint_folder.run_folder_of(path) if path and checkpoint_folder.names_one(path) else None


@dataclass(frozen=True)
class ResumeState:
    """The start of a run or session.

    Args:
        progress: The restored progress.
        checkpoints: The run's checkpoints; only rank 0 writes them.
        notes: Lines to print.
        before: Another run folder that the run was resumed from.
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
) -> ResumeState:
    """Restore the state to resume from, if any, and create the run folder, which must be locked.

    Raises:
        CheckpointError: The state is damaged, or belongs to another job.
        ConfigError: The folder holds another run's checkpoints, or --start-epoch is past the end.
    """
    progress, notes = Progress(), list[str]()
    if point.state is not None and world.from_main(is_old(point.state)):
        progress, notes = take_over(point.state, config, weights, steps_per_epoch)
        optim.precision.refresh()
        optim.average.begin()
        point = ResumePoint()  # older scripts have no run folder
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
        progress.forget_best()  # the best checkpoint stays in the other folder
    go_back(checkpoints, progress, world)
    return ResumeState(progress, checkpoints, notes, before)


def find_resume_point(config: TrainConfig, world: World, own: Path | None = None) -> ResumePoint:
    """Find the state to resume from, equal on every worker.

    For a run folder or "auto" this is the newest undamaged checkpoint. Restarted workers resume from their own run's
    newest checkpoint or snapshot in memory; if there is none, the configuration applies.

    Args:
        own: The run folder that "auto" searches; None: the newest run of the same kind.

    Raises:
        CheckpointError: There is no checkpoint, the named one is damaged, or all are.
    """
    memory = world.rank_info.snapshots
    if memory is not None and config.run.run_dir is None:
        raise ConfigError("--max-restarts needs --run-dir DIR: restarted workers find their run by its folder")
    found: Path | None = None
    again, notes = False, list[str]()
    if world.is_main and world.rank_info.restart:
        found, notes = _find_own(config)
        again = found is not None
    if world.is_main and found is None and config.run.resume:
        found, notes = _find(config, own)
    path, again = world.from_main([str(found) if found else None, again])
    state = Path(path) if path else None
    point = ResumePoint(state, again, verified=world.is_main, notes=tuple(notes))
    if memory is None or not world.rank_info.restart:
        return point
    snapshot = bring_newest(memory, world, after=checkpoint_folder.step_of(state) if state and again else NONE)
    if snapshot is None:
        return point
    return replace(point, state=snapshot, again=True, verified=False, is_snapshot=True, checkpoint=state)


def _find_own(config: TrainConfig) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that this job wrote before its workers were restarted."""
    if config.run.run_dir is None:
        return None, []
    try:
        return _newest_sound(config.run.run_dir / "checkpoints")
    except CheckpointError as error:  # a snapshot may be usable
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
    """Return the newest undamaged checkpoint in a folder, and lines on newer, damaged ones."""
    found, problems = checkpoint_folder.newest_sound(folder)
    return found, [f"{problem}; resuming from {found}" for problem in problems]


def _begin_folder(config: TrainConfig, world: World, held: HeldRun, is_new: bool) -> Checkpoints:
    """Create the run folder on rank 0, the only rank that writes checkpoints; reject that of another run."""
    folder = held.folder
    if not world.is_main:
        return Checkpoints()
    check_unused(config, folder, is_new)
    folder.create(config, world)
    return CheckpointFolder(folder.checkpoints, config.run.keep, confirm=held.confirm)


def check_unused(config: TrainConfig, folder: RunFolder, is_new: bool) -> None:
    """Reject the folder of an earlier run for a new run.

    Raises:
        ConfigError: The folder holds another run's checkpoints.
    """
    if is_new and checkpoint_folder.newest(folder.checkpoints):
        fix = "add --resume auto to continue it, or choose another folder"
        if config.run.start_epoch is not None:
            fix = "--start-epoch starts a new run: choose another folder, or leave out --start-epoch"
        raise ConfigError(f"--run-dir {folder.path} contains checkpoints of an earlier run; {fix}")


def restore(point: ResumePoint, identity: dict[str, Any], weights: nn.Module, optim: Optimization) -> Progress:
    """Restore a run's state, and return its progress."""
    path, strategy, precision = point.state, optim.strategy, optim.precision
    assert path
    snapshot = checkpoint_format.load(path, point.verified)
    if wrong := differences(snapshot.job, identity):
        raise CheckpointError(f"{path} belongs to another job: it was made with {'; '.join(wrong)}")
    try:
        weights.load_state_dict(snapshot.model)
        precision.refresh()
        optim.average.load_state_dict(snapshot.average)
        same_precision = snapshot.precision.get("name") == precision.name
        load_keeping_flags(optim.optimizer, snapshot.optimizer, optim.kept, same_precision)
        strategy.load_state_dict(snapshot.strategy)
        if same_precision:
            precision.load_state_dict(snapshot.precision)
            strategy.rescale(precision.loss_scale / snapshot.precision.get("scale", precision.loss_scale))
        else:
            strategy.forget_gradients()
        return Progress.from_mapping(snapshot.progress)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from None


def differences(job: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Return the settings of a checkpoint's job that differ from this job's, such as "seed 0, not 1"."""
    return [f"{key} {job.get(key)}, not {value}" for key, value in identity.items() if job.get(key) != value]


def newest_good(saving: Saving, world: World) -> Path | None:
    """Return the newest snapshot or checkpoint of this run, equal on every worker; None if there is none yet."""
    for folder in (saving.checkpoints, saving.snapshots):
        with suppress(CheckpointError):  # if the last one was not written, use the one before
            folder.wait()
    found = checkpoint_folder.newest(saving.folder.checkpoints) if world.is_main else None
    path = world.from_main(str(found) if found else None)
    good, memory = Path(path) if path else None, world.rank_info.snapshots
    snapshot = bring_newest(memory, world, checkpoint_folder.step_of(good) if good else NONE) if memory else None
    return snapshot or good


def rewind(job: Job, trouble: RewindError) -> None:
    """Restore the newest good state. Call it on all workers.

    Raises:
        NonFiniteLossError: There is no state from before the bad step; raised on all workers.
        CheckpointError: The checkpoint is damaged.
    """
    path, reached = newest_good(job.saving, job.world), job.progress.step
    if path is None:
        raise NonFiniteLossError(
            f"{trouble}; --on-nan rewind has no checkpoint to go back to yet: add --checkpoint-steps N, or use "
            f"--on-nan skip"
        )
    job.optim.strategy.forget_gradients()
    job.network.model.zero_grad()
    progress = restore(ResumePoint(path), job.saving.identity, job.network.weights, job.optim)
    job.meter.forget()
    job.interval.restart()
    job.worker_times.forget()
    job.replicas.forget()
    if progress.step >= trouble.step:
        raise NonFiniteLossError(f"{trouble}; the newest checkpoint, {path}, is not older than that step")
    go_back(job.saving.checkpoints, progress, job.world)
    job.saving.snapshots.forget_after(progress.step, NONE)
    job.progress.become(progress)
    job.tracker.rewind(progress.step, in_epoch=progress.epoch_totals.count > 0)
    job.say(
        [
            f"{trouble}; rewinding from step {reached} to {path.name}, to repeat the steps since then without the "
            f"update of step {trouble.step}"
        ],
        ALWAYS,
    )
