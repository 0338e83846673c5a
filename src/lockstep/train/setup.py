"""From a configuration and a world to everything that the training loop uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from lockstep.config import TrainConfig
from lockstep.data import catalog
from lockstep.data.loaders import EvalLoader, TrainLoader, reader_for
from lockstep.data.readers import Placement, Reader
from lockstep.data.sets import ImageData, MemorySplit, Split
from lockstep.data.sharding import Sharding
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.models import registry
from lockstep.seeding import seed_all
from lockstep.train import checkpoint
from lockstep.train.batching import Batching, plan_batches
from lockstep.train.calibration import calibrate
from lockstep.train.checkpoint import CheckpointFolder, Checkpoints, Snapshot
from lockstep.train.ema import NoAverage, build_average
from lockstep.train.metrics import Meter
from lockstep.train.optim import build_optimizer
from lockstep.train.precision import Precision, build_precision
from lockstep.train.progress import Progress
from lockstep.train.run_folder import RunFolder, new_run_path, newest_run_path
from lockstep.train.schedule import Schedule, build_schedule, peak_rate
from lockstep.train.stopping import Stopping, build_stopping
from lockstep.train.strategies import Strategy, build_strategy
from lockstep.train.trackers import Tracker, build_trackers
from lockstep.world import World, usable_cores

Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MAX_LOADER_PROCESSES = 8


@dataclass(frozen=True)
class Job:
    """All parts of one worker's training run.

    `model` holds the weights; `replica` is what training calls: the same, compiled and wrapped by the strategy.
    `criterion` gives one loss a sample: (logits [N, K], labels [N]) to [N].
    """

    config: TrainConfig
    world: World
    data: ImageData
    model: nn.Module
    replica: nn.Module
    average: NoAverage
    criterion: Criterion
    optimizer: Optimizer
    schedule: Schedule
    batching: Batching
    strategy: Strategy
    precision: Precision
    train_loader: TrainLoader
    val_loader: EvalLoader
    meter: Meter
    folder: RunFolder
    checkpoints: Checkpoints
    tracker: Tracker
    progress: Progress
    stopping: Stopping
    identity: dict[str, Any]

    @property
    def steps_per_epoch(self) -> int:
        return self.train_loader.sharding.steps_per_epoch

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        planned = self.config.epochs * self.steps_per_epoch
        return min(planned, self.config.max_steps or planned)

    def about(self) -> dict[str, Any]:
        """What one must know to use the weights."""
        return {
            "arch": self.config.model.arch,
            "classes": list(self.data.classes),
            "input": asdict(self.data.input),
            "data": self.config.data.source,
        }

    def close(self) -> None:
        """End what the job started."""
        with ExitStack() as stack:  # each, even if another's fails
            for closing in (self.train_loader.reader, self.val_loader.reader, self.tracker):
                stack.callback(closing.close)


def load_data(config: TrainConfig, world: World) -> ImageData:
    """Load the data set on every worker; if it must be fetched, one worker a node does so first."""
    name, data = config.data.source, None
    if name in catalog.NAMED and catalog.NAMED[name].fetched:
        if world.place.local_rank == 0:
            data = catalog.load(config.data, download=config.data.download)
        world.barrier()
    data = data or catalog.load(config.data)
    if not len(data.train) or not len(data.val):
        raise DataError(f"{name}: the training and validation sets must not be empty")
    return data


def build_model(config: TrainConfig, data: ImageData) -> nn.Module:
    """The model with this data's classes and channels; its weights depend on the seed alone.

    One that is calibrated depends on the training images too.
    """
    seed_all(config.seed, 0, 0)
    side = min(data.input.height, data.input.width)
    model = registry.build(config.model.arch, len(data.classes), data.input.channels, side)
    calibrate(model, config.model.arch, data)
    return model


def place_model(model: nn.Module, config: TrainConfig, precision: Precision, world: World) -> nn.Module:
    """The model on the worker's device, in the precision and memory order that are asked for."""
    return precision.prepare(model).to(world.device).to(memory_format=_memory_format(config))


def build_job(config: TrainConfig, world: World, data: ImageData, model: nn.Module) -> Job:
    """Put a run together, and restore its state if it resumes one.

    Raises:
        ConfigError: The configuration contradicts the world or the data.
        CheckpointError: The checkpoint to resume is damaged or belongs to another job.
    """
    strategy = build_strategy(config, world)
    precision = build_precision(config, world.device.type)
    batching = plan_batches(config, world.size)
    model = place_model(model, config, precision, world)
    # Inside the strategy: DistributedDataParallel's own forward is nothing that torch.compile takes in.
    compiled = cast(nn.Module, torch.compile(model)) if config.model.compile else model
    replica = strategy.wrap(compiled)
    average = build_average(model, config.model.ema_decay)
    optimizer = build_optimizer(model, config.optim)
    train_loader = build_train_loader(config, world, data, precision, batching)
    val_loader = build_val_loader(config, world, data, precision, batching)
    peak, _ = peak_rate(config.optim, batching.global_batch)

    progress, identity = Progress(), identify(config, data, batching)
    resumed = _find_checkpoint(config, world)
    if resumed is not None:
        progress = _restore(resumed, identity, model, average, optimizer)
    folder = RunFolder(Path(world.from_main(str(_choose_run_path(config, resumed)))))
    if world.is_main:
        if resumed is None and checkpoint.newest(folder.checkpoints):
            raise ConfigError(
                f"--run-dir {folder.path} holds the checkpoints of an earlier run; add --resume auto to go on with it, "
                f"or choose another folder"
            )
        folder.create(config, world)
    checkpoints = CheckpointFolder(folder.checkpoints, config.run.keep) if world.is_main else Checkpoints()
    if resumed is not None and checkpoint.run_folder_of(resumed) != folder.path.resolve():
        progress.best_top1, progress.best_step = -1.0, 0  # the best of the other folder stays there
    checkpoints.forget_after(progress.step, progress.best_step)
    return Job(
        config=config,
        world=world,
        data=data,
        model=model,
        replica=replica,
        average=average,
        criterion=partial(F.cross_entropy, reduction="none", label_smoothing=config.optim.label_smoothing),
        optimizer=optimizer,
        schedule=build_schedule(config.optim, peak, config.epochs, train_loader.sharding.steps_per_epoch),
        batching=batching,
        strategy=strategy,
        precision=precision,
        train_loader=train_loader,
        val_loader=val_loader,
        meter=Meter(world),
        folder=folder,
        checkpoints=checkpoints,
        tracker=build_trackers(config, world, folder, progress),
        progress=progress,
        stopping=build_stopping(world),
        identity=identity,
    )


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


def build_train_loader(
    config: TrainConfig, world: World, data: ImageData, precision: Precision, batching: Batching
) -> TrainLoader:
    """This worker's share of each training step."""
    sharding = Sharding(
        len(data.train), batching.global_batch, world.rank, world.size, config.seed, config.data.drop_last
    )
    return TrainLoader(_build_reader(config, world, data, data.train, precision), sharding, world.device)


def build_val_loader(
    config: TrainConfig, world: World, data: ImageData, precision: Precision, batching: Batching
) -> EvalLoader:
    """This worker's part of an evaluation, in batches as large as a forward pass of training."""
    one_pass = -(-batching.global_batch // (world.size * batching.accumulate))
    reader = _build_reader(config, world, data, data.val, precision)
    return EvalLoader(reader, len(data.val), one_pass, world.rank, world.size, world.device)


def _build_reader(config: TrainConfig, world: World, data: ImageData, split: Split, precision: Precision) -> Reader:
    return reader_for(
        split,
        data.input,
        Placement(world.device, precision.input_dtype, _memory_format(config)),
        config.augment,
        seed=config.seed,
        processes=_loader_processes(config, world, split),
        skip_corrupt=config.data.skip_corrupt,
    )


def _loader_processes(config: TrainConfig, world: World, split: Split) -> int:
    """Loader processes of this worker; auto shares the node's cores out over its workers."""
    if isinstance(split, MemorySplit):
        return 0
    if config.data.loader_workers != "auto":
        return config.data.loader_workers
    return max(1, min(MAX_LOADER_PROCESSES, usable_cores() // world.place.local_size))


def _memory_format(config: TrainConfig) -> torch.memory_format:
    return torch.channels_last if config.model.channels_last else torch.contiguous_format


def _find_checkpoint(config: TrainConfig, world: World) -> Path | None:
    """The checkpoint to go on from, the same on every worker; None starts anew."""
    found = None
    if world.is_main and config.run.resume:
        if config.run.resume != "auto":
            found = checkpoint.locate(Path(config.run.resume))
        else:
            run = config.run.run_dir or newest_run_path(config)
            found = checkpoint.newest(run / "checkpoints") if run else None
    path = world.from_main(str(found) if found else None)
    return Path(path) if path else None


def _choose_run_path(config: TrainConfig, resumed: Path | None) -> Path:
    if config.run.run_dir is not None:
        return config.run.run_dir
    return checkpoint.run_folder_of(resumed) if resumed else new_run_path(config)


def _restore(
    path: Path, identity: dict[str, Any], model: nn.Module, average: NoAverage, optimizer: Optimizer
) -> Progress:
    """Put a checkpoint's state into the parts of a run, and return how far it had come."""
    snapshot = checkpoint.load(path)
    different = {key: (snapshot.job.get(key), value) for key, value in identity.items()}
    wrong = [f"{key} {was}, not {now}" for key, (was, now) in different.items() if was != now]
    if wrong:
        raise CheckpointError(f"{path} belongs to another job: it was made with {'; '.join(wrong)}")
    try:
        model.load_state_dict(snapshot.model)
        average.load_state_dict(snapshot.average)
        _load_optimizer(optimizer, snapshot)
        return Progress.from_mapping(snapshot.progress)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from None


def _load_optimizer(optimizer: Optimizer, snapshot: Snapshot) -> None:
    """Restore the optimizer's state, but keep what the flags of this session say, such as the weight decay."""
    configured = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(snapshot.optimizer))
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
