"""Begin or resume a training, and write its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config.run_paths import how_to_resume
from lockstep.config.schema import TrainConfig
from lockstep.data.sets import ImageData
from lockstep.diagnosis import publisher
from lockstep.errors import ConfigError, NonFiniteLossError
from lockstep.models.optimizer_state import stepping
from lockstep.run.checkpoints.legacy_format import is_old, load_weights, read
from lockstep.run.checkpoints.snapshot import Snapshot
from lockstep.run.named_states import gather_states, restore_states
from lockstep.run.records.run_folder import HeldRun
from lockstep.run.records.trackers import build_console
from lockstep.run.replicas import are_finite
from lockstep.run.resume import ResumePoint, open_session, restore
from lockstep.run.session import Session
from lockstep.train.custom import check_savable
from lockstep.train.job import Job, Optimization
from lockstep.train.kept_states import states_of
from lockstep.train.optim.schedule import Batching, Schedule
from lockstep.train.progress import Progress
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
            point, identity, lambda stored: (put_back(states_of(weights, optim), stored), stored.states["optimizer"])
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


def put_back(states: Mapping[str, Any], snapshot: Snapshot) -> Progress:
    """Restore the states of a training, and return its progress."""
    restore_states(states, snapshot.model, snapshot.states)
    return Progress.from_mapping(snapshot.progress)


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
    session = job.session
    stores_whole = (session.checkpoints if durably else session.snapshots).stores_whole
    states = states_of(job.network.weights, job.optim)
    # What is not held changes only in the optimizer step, after `copies.protect()`.
    tensors, others = gather_states(states, stores_whole, in_parts=False, hold=session.copies.steady)
    session.save(tensors, others, job.about(), is_best, durably)
    if durably:
        job.hooks.saved(job.session.checkpoints, job.session.folder.checkpoints)
