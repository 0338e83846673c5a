"""Begin or resume a training, and write its states to checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config.run_paths import how_to_resume
from lockstep.config.schema import TrainConfig
from lockstep.data.sets import ImageData
from lockstep.errors import ConfigError
from lockstep.models.optimizer_state import stepping
from lockstep.run.checkpoints.legacy_format import is_old, load_weights, read
from lockstep.run.named_states import OptimizerState
from lockstep.run.records.run_folder import RunFolder
from lockstep.run.records.trackers import build_console
from lockstep.run.resume import ResumePoint, open_session, restore
from lockstep.run.session import RunDescription, Session
from lockstep.train.custom import check_savable
from lockstep.train.job import Job, Optimization
from lockstep.train.optim.schedule import Schedule
from lockstep.train.precision import Precision
from lockstep.train.progress import Progress
from lockstep.train.strategies import Strategy
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


def _describe(
    config: TrainConfig, world: World, folder: RunFolder, weights: nn.Module, optim: Optimization, data: ImageData
) -> RunDescription:
    identity = {
        "DATASET": data.name,
        "number of training samples": len(data.train),
        "--arch": config.model.arch,
        "--optimizer": config.optim.optimizer if optim.kept is None else type(stepping(optim.optimizer)).__qualname__,
        "--freeze": list(config.model.freeze),
        "--ema-decay": config.model.ema_decay,
        "--seed": config.seed,
        "--global-batch-size": optim.batching.global_batch,
        "--drop-last": config.data.drop_last,
        "--bits": data.input.bits,
    }
    about = {  # what is needed to use the weights
        "arch": config.model.arch,
        "classes": list(data.classes),
        "input": asdict(data.input) if data.has_images else None,
        "data": config.data.source,
    }
    return RunDescription(
        identity,
        states_of(weights, optim),
        how_to_resume(folder.path, world.rank_info.launcher != "none"),
        about,
        partial(build_console, config.run, len(data.classes), data.noun),
        advice=". Lower --lr, lengthen --warmup-epochs or add --clip-norm 1",
        gathers_state=optim.strategy.gathers_state,
        protects_late=True,
    )


def begin(
    point: ResumePoint,
    config: TrainConfig,
    world: World,
    folder: RunFolder,
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
    described = _describe(config, world, folder, weights, optim, data)
    progress, notes = Progress(), list(point.notes)
    if point.state is not None and world.from_main(is_old(point.state)):
        progress, lines = take_over(point.state, config, weights, steps_per_epoch)
        optim.precision.refresh()
        optim.average.begin()
        point, notes = ResumePoint(), [*notes, *lines]  # older scripts have no run folder
    elif point.state is not None:
        progress, stored = restore(point, described, Progress)
        notes += _describe_rise(config, optim, progress, stored.states["optimizer"]["param_groups"][0]["lr"])
    begun = progress if point.again else begin_at(progress, config, steps_per_epoch)
    if begun is not progress:
        progress, point = begun, ResumePoint()
    return open_session(point, config, world, folder, described, progress), notes


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


def states_of(weights: nn.Module, optim: Optimization) -> dict[str, Any]:
    """Return the states of a training by their names in checkpoints, in the order in which they are restored."""
    precision = PrecisionState(optim.precision, optim.strategy)
    return {
        "model": weights,
        "average": optim.average,
        "strategy": optim.strategy,
        "precision": precision,
        "optimizer": OptimizerState(optim.optimizer, optim.kept, lambda: precision.is_same),
    }


class PrecisionState:
    """The state of the precision, which is left out of a run that another one continues.

    Attributes:
        is_same: Whether the checkpoint is of this precision.
    """

    def __init__(self, precision: Precision, strategy: Strategy):
        self._precision, self._strategy, self.is_same = precision, strategy, True

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._precision.name, **self._precision.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, after the weights and what the strategy has derived from scaled gradients."""
        precision = self._precision
        precision.refresh()
        self.is_same = state["name"] == precision.name
        if self.is_same:
            precision.load_state_dict(state)
            self._strategy.rescale(precision.loss_scale / state.get("scale", precision.loss_scale))
        else:
            self._strategy.forget_gradients()


def save(job: Job, is_best: bool = False, durably: bool = True) -> None:
    """Check the state, and write it in the background, as `Session.save` does. Call it on all workers.

    Raises:
        ConfigError: The optimizer's state cannot be stored in a checkpoint.
    """
    if not durably and job.world.size > job.world.rank_info.local_size:  # each host writes its own snapshot
        job.optim.strategy.broadcast([*job.network.weights.buffers(), *job.optim.average.model.buffers()])
    if job.optim.kept is not None:  # a custom optimizer
        check_savable(stepping(job.optim.optimizer))
    job.session.save(is_best, durably)
    if durably:
        job.hooks.saved(job.session.checkpoints, job.session.folder.checkpoints)
