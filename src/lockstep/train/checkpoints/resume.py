"""Save and restore the state of a run: choose the checkpoint, check that it belongs to the same job, and restore it.

Loader, augmentation and dropout depend only on (seed, epoch, step), so repeated steps are identical. Their records are
removed first, so each appears once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from lockstep.config.run_paths import how_to_resume
from lockstep.config.schema import TrainConfig
from lockstep.data.sets import ImageData
from lockstep.diagnosis import publisher
from lockstep.errors import CheckpointError, ConfigError, NonFiniteLossError
from lockstep.models.buffers import load_state
from lockstep.train.checkpoints import checkpoint_folder, checkpoint_format
from lockstep.train.checkpoints.checkpoint_folder import CheckpointFolder, Checkpoints, ShardWriter
from lockstep.train.checkpoints.legacy_format import is_old, load_weights, read
from lockstep.train.checkpoints.memory_snapshots import NONE, bring_newest, open_snapshots, snapshots_of
from lockstep.train.checkpoints.sharded import WriteBarrier
from lockstep.train.checkpoints.snapshot import HostCopies, Snapshot, Tensors
from lockstep.train.custom import check_savable
from lockstep.train.guards.nonfinite import are_finite
from lockstep.train.guards.stopping import build_stopping
from lockstep.train.job import Job, Optimization
from lockstep.train.kept_run import kept_run
from lockstep.train.optim.build import load_keeping_flags, stepping
from lockstep.train.optim.schedule import Batching, Schedule
from lockstep.train.progress import Position, Progress
from lockstep.train.run_folder import HeldRun, RunFolder, newest_run_path
from lockstep.train.session import Session
from lockstep.train.trackers import Tracker, build_console
from lockstep.train.tracking_services import build_trackers
from lockstep.world.world import World

P = TypeVar("P", bound=Position)
T = TypeVar("T")
Found = tuple[Path | None, list[str]]
"""A checkpoint, and lines on newer, damaged ones."""


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
    """Return the settings that must be equal in a run and its continuation, by flag; `optimizer` names a custom one."""
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
        "--bits": data.input.bits,
    }


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


def restore(
    point: ResumePoint, identity: Mapping[str, Any], put_back: Callable[[Snapshot], T], later: Sequence[str] = ()
) -> T:
    """Restore a run's state with `put_back`, and return what it returns.

    Args:
        later: Settings that older checkpoints do not have.

    Raises:
        CheckpointError: The state is damaged, belongs to another job, or does not fit this one.
    """
    path = point.state
    assert path
    snapshot = checkpoint_format.load(path, point.verified, to_shard=True)
    job = {**{name: identity[name] for name in later if name in identity}, **snapshot.job}
    if wrong := [f"{key} {job.get(key)}, not {value}" for key, value in identity.items() if job.get(key) != value]:
        fix = "use the same settings, or another run folder"
        raise CheckpointError(f"{path} belongs to another job: it was made with {'; '.join(wrong)}; {fix}")
    try:
        return put_back(snapshot)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{path} does not fit this run: {' '.join(str(error).split())}") from None


def open_session(
    point: ResumePoint,
    config: TrainConfig,
    world: World,
    held: HeldRun,
    identity: dict[str, Any],
    progress: P,
    build_console: Callable[[], Tracker],
    how_to_resume: str,
    *,
    has_recipe: bool = True,
    gathers_state: bool = True,
    is_sharded: bool = False,
) -> Session[P]:
    """Begin this job's part of a run after its state was restored: create the folder, which must be locked. Collective.

    Args:
        has_recipe: Whether the configuration describes the whole run, so that the folder keeps it.
        gathers_state: Whether only rank 0 has the whole state when it is saved.
        is_sharded: Whether each worker has a part of the state.

    Raises:
        ConfigError: The folder holds another run's checkpoints, or cannot be written; raised on all workers.
    """
    folder, checkpoints, before = held.folder, Checkpoints(), point.before(held.folder)
    on_disk = in_memory = None

    def create() -> None:
        check_unused(config, folder, point.state is None, how_to_resume)
        folder.create(world, config if has_recipe else None)

    world.on_main(create)
    if is_sharded and world.size > 1:
        token = world.from_main(secrets.token_hex(4))
        _check_seen_by_all(folder.path / f".{token}", world)
        on_disk, in_memory = (WriteBarrier(world, token + kind) for kind in ("d", "m"))
    if world.is_main:
        checkpoints = CheckpointFolder(folder.checkpoints, config.run.keep, confirm=held.confirm, barrier=on_disk)
    elif on_disk:
        checkpoints = ShardWriter(folder.checkpoints, True, on_disk)
    if before:
        progress.take_best({})  # the best checkpoint stays in the other folder
    session = Session(
        world,
        held,
        before,
        identity,
        how_to_resume,
        progress,
        build_trackers(config, world, folder, progress, build_console),
        checkpoints,
        open_snapshots(config, world, folder.path, gathers_state, in_memory),
        HostCopies(world.device, world.rank_info.local_size),
        build_stopping(world),
        kept_run(folder.path),
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


def check_unused(config: TrainConfig, folder: RunFolder, is_new: bool, how_to_resume: str) -> None:
    """Reject the folder of an earlier run for a new run.

    Raises:
        ConfigError: The folder holds another run's checkpoints.
    """
    if is_new and checkpoint_folder.newest(folder.checkpoints):
        fix = f"{how_to_resume}; or choose another folder"
        if config.run.start_epoch is not None:
            fix = "--start-epoch starts a new run: choose another folder, or leave out --start-epoch"
        raise ConfigError(f"run folder {folder.path} contains checkpoints of an earlier run; {fix}")


def begin(
    point: ResumePoint,
    config: TrainConfig,
    world: World,
    held: HeldRun,
    identity: dict[str, Any],
    weights: nn.Module,
    optim: Optimization,
    steps_per_epoch: int,
    data: ImageData,
) -> tuple[Session[Progress], list[str]]:
    """Restore the state to resume from, if any, and begin this job's part of the run; also return lines to print.

    Raises:
        CheckpointError: The state is damaged, or belongs to another job.
        ConfigError: --start-epoch is past the end, or as for `open_session`.
    """
    progress, notes = Progress(), list(point.notes)
    if point.state is not None and world.from_main(is_old(point.state)):
        progress, lines = take_over(point.state, config, weights, steps_per_epoch)
        optim.precision.refresh()
        optim.average.begin()
        point, notes = ResumePoint(), [*notes, *lines]  # older scripts have no run folder
    elif point.state is not None:
        progress, last = restore(
            point, identity, lambda stored: (put_back(weights, optim, stored), stored.states["optimizer"])
        )
        notes += _describe_rise(config, optim, progress, last["param_groups"][0]["lr"])
    begun = progress if point.again else begin_at(progress, config, steps_per_epoch)
    if begun is not progress:
        progress, point = begun, ResumePoint()
    console = partial(build_console, config.run, len(data.classes), data.noun)
    how = how_to_resume(held.folder.path, world.rank_info.launcher != "none")
    gathers_state = optim.strategy.gathers_state
    return open_session(
        point, config, world, held, identity, progress, console, how, gathers_state=gathers_state
    ), notes


def _describe_rise(config: TrainConfig, optim: Optimization, progress: Progress, last: float) -> list[str]:
    """Return a line if the rate rises after the warm-up, as it does if a run gets more epochs."""
    taken, schedule = progress.steps_taken, optim.schedule
    if not isinstance(schedule, Schedule) or taken < schedule.warmup_steps:
        return []
    if (rate := schedule.rate(taken)) <= 1.000001 * last:
        return []
    return [
        f"the learning rate rises again, from {float(last):.3g} to {rate:.3g}: its schedule now has "
        f"--epochs {config.epochs} and --lr {config.optim.lr:g}; to avoid that, train with them from the start"
    ]


def put_back(weights: nn.Module, optim: Optimization, snapshot: Snapshot) -> Progress:
    """Restore the state of a training, and return its progress."""
    precision, strategy, states = optim.precision, optim.strategy, snapshot.states
    load_state(weights, snapshot.model)
    precision.refresh()
    optim.average.load_state_dict(states["average"])
    same_precision = states["precision"]["name"] == precision.name
    load_keeping_flags(optim.optimizer, states["optimizer"], optim.kept, same_precision)
    strategy.load_state_dict(states["strategy"])
    if same_precision:
        precision.load_state_dict(states["precision"])
        strategy.rescale(precision.loss_scale / states["precision"].get("scale", precision.loss_scale))
    else:
        strategy.forget_gradients()
    return Progress.from_mapping(snapshot.progress)


def _gather(job: Job) -> tuple[Tensors, dict[str, Any]]:
    """Return the job's state after its last step; on rank 0 after the strategy's `gather_state` on all workers."""
    weights, optim = job.network.weights, job.optim
    model = weights.state_dict()
    # The next forward pass changes buffers; the rest changes only in the optimizer step, after `copies.protect()`.
    buffers = {name: tensor for name, tensor in weights.named_buffers() if name in model}
    return {**model, **job.session.copies.steady(buffers)}, {
        "average": optim.average.state_dict(),
        "optimizer": optim.optimizer.state_dict(),
        "strategy": optim.strategy.state_dict(),
        "precision": {"name": optim.precision.name, **optim.precision.state_dict()},
    }


def save(job: Job, is_best: bool = False, durably: bool = True) -> None:
    """Check the state, and write it in the background. Call it on all workers.

    Args:
        durably: True: a checkpoint on disk; False: a snapshot in this host's memory.

    Raises:
        ReplicasDifferError: The workers' weights differ; raised on all workers.
        NonFiniteLossError: Weights are NaN or infinite; raised on all workers.
        ConfigError: The optimizer's state cannot be stored in a checkpoint.
    """
    publisher.report("checkpoint")
    if not durably and job.world.size > job.world.rank_info.local_size:  # each host writes its own snapshot
        job.optim.strategy.broadcast([*job.network.weights.buffers(), *job.optim.average.model.buffers()])
    step = job.progress.step
    job.replicas.check(step)  # first: a NaN on one worker only is a fault of that worker
    if not are_finite(job.world, job.network.weights):
        raise NonFiniteLossError(
            f"the weights are NaN or infinite after step {step}; no checkpoint was written. {job.advice()}"
        )
    if job.optim.kept is not None:  # a custom optimizer
        check_savable(stepping(job.optim.optimizer))
    job.optim.strategy.gather_state(job.optim.optimizer)
    job.session.save(partial(_gather, job), job.about(), is_best, durably)
    if durably:
        job.hooks.saved(job.session.checkpoints, job.session.folder.checkpoints)
