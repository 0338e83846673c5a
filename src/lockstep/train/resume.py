"""Going on from a run's checkpoint: which one, whether it is of the same job, and its state into the run's parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.config import TrainConfig
from lockstep.data.sets import ImageData
from lockstep.errors import CheckpointError, ConfigError
from lockstep.train import checkpoint
from lockstep.train.batching import Batching
from lockstep.train.checkpoint import CheckpointFolder, Checkpoints
from lockstep.train.ema import NoAverage
from lockstep.train.old_checkpoint import is_old
from lockstep.train.optim import load_keeping_flags
from lockstep.train.precision import Precision
from lockstep.train.progress import Progress
from lockstep.train.run_folder import RunFolder, new_run_path, newest_run_path
from lockstep.train.strategies import Strategy
from lockstep.world import World


def identify(config: TrainConfig, data: ImageData, batching: Batching) -> dict[str, Any]:
    """What a run and its continuation must share, each under the flag that sets it."""
    return {
        "DATASET": data.name,
        "number of training samples": len(data.train),
        "--arch": config.model.arch,
        "--optimizer": config.optim.optimizer,
        "--ema-decay": config.model.ema_decay,
        "--seed": config.seed,
        "--global-batch-size": batching.global_batch,
        "--drop-last": config.data.drop_last,
    }


def find_checkpoint(config: TrainConfig, world: World) -> Path | None:
    """The checkpoint to go on from, the same on every worker; None starts anew."""
    found = None
    if world.is_main and config.run.resume:
        if config.run.resume != "auto":
            named = Path(config.run.resume)
            found = named if is_old(named) else checkpoint.locate(named)
        else:
            run = config.run.run_dir or newest_run_path(config)
            found = checkpoint.newest(run / "checkpoints") if run else None
    path = world.from_main(str(found) if found else None)
    return Path(path) if path else None


def open_folder(config: TrainConfig, world: World, resumed: Path | None) -> tuple[RunFolder, Checkpoints]:
    """The run's folder, created by rank 0, which alone writes checkpoints.

    Raises:
        ConfigError: The folder holds another run's checkpoints.
    """
    folder = RunFolder(Path(world.from_main(str(_choose_run_path(config, resumed)))))
    if not world.is_main:
        return folder, Checkpoints()
    if resumed is None and checkpoint.newest(folder.checkpoints):
        way_out = "add --resume auto to go on with it, or choose another folder"
        if config.run.start_epoch is not None:
            way_out = "--start-epoch begins a run of its own: choose another folder, or leave --start-epoch out"
        raise ConfigError(f"--run-dir {folder.path} holds the checkpoints of an earlier run; {way_out}")
    folder.create(config, world)
    return folder, CheckpointFolder(folder.checkpoints, config.run.keep)


def _choose_run_path(config: TrainConfig, resumed: Path | None) -> Path:
    if config.run.run_dir is not None:
        return config.run.run_dir
    return checkpoint.run_folder_of(resumed) if resumed else new_run_path(config)


def restore(
    path: Path,
    identity: dict[str, Any],
    weights: nn.Module,
    average: NoAverage,
    optimizer: Optimizer,
    strategy: Strategy,
    precision: Precision,
) -> Progress:
    """Put a checkpoint's state into the parts of a run, and return how far it had come."""
    snapshot = checkpoint.load(path)
    different = {key: (snapshot.job.get(key), value) for key, value in identity.items()}
    wrong = [f"{key} {was}, not {now}" for key, (was, now) in different.items() if was != now]
    if wrong:
        raise CheckpointError(f"{path} belongs to another job: it was made with {'; '.join(wrong)}")
    try:
        weights.load_state_dict(snapshot.model)
        precision.refresh()
        average.load_state_dict(snapshot.average)
        load_keeping_flags(optimizer, snapshot.optimizer)
        strategy.load_state_dict(snapshot.strategy)
        if snapshot.precision.get("name") == precision.name:
            precision.load_state_dict(snapshot.precision)
            strategy.rescale(precision.loss_scale / snapshot.precision.get("scale", precision.loss_scale))
        else:
            strategy.forget_gradients()
        return Progress.from_mapping(snapshot.progress)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from None
