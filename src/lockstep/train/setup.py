"""Build everything that the training loop uses from a configuration and a world."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from lockstep.config.schema import TrainConfig
from lockstep.data import catalog
from lockstep.data.loaders import EvalLoader, TrainLoader, reader_for
from lockstep.data.readers import Normalizer, Placement, Reader
from lockstep.data.sets import EncodedSplit, ImageData, MemorySplit, Split
from lockstep.data.transforms import Mixing, mixes
from lockstep.diagnosis import publisher
from lockstep.errors import ConfigError, DataError
from lockstep.models import pretrained, registry
from lockstep.run.balance import Balance, check_measurable
from lockstep.run.records.run_folder import HeldRun, unknown_to_others
from lockstep.run.replicas import check_shares
from lockstep.run.resume import find_resume_point
from lockstep.seeding import seed_all
from lockstep.train.begin import begin
from lockstep.train.callbacks import TrainingState, build_hooks
from lockstep.train.custom import COMPUTED_BY, SCHEDULED, CustomParts, CustomSchedule, take_optimizer
from lockstep.train.guards.checks import check_model, check_same_job
from lockstep.train.guards.nonfinite import build_guard
from lockstep.train.job import Job, Loading, Network, Optimization
from lockstep.train.metrics import Criterion, CustomLoss, Measures, Meter, cross_entropy
from lockstep.train.monitoring.data_wait import DataWait, advise, choose_processes, count_processes
from lockstep.train.monitoring.history import EpochRecords, read_epochs
from lockstep.train.monitoring.worker_times import ReportInterval, WorkerTimes, time_batch_norms
from lockstep.train.optim.build import build_optimizer, describe_frozen, freeze, set_rate
from lockstep.train.optim.ema import build_average
from lockstep.train.optim.schedule import Batching, Schedule, build_schedule, build_sharding, peak_rate, plan_batches
from lockstep.train.precision import Precision, build_precision
from lockstep.train.strategies import Strategy, build_strategy
from lockstep.train.strategies.captured_passes import CapturedPasses, check_capturable
from lockstep.world import accelerator, observer
from lockstep.world.step_clock import StepClock
from lockstep.world.world import World

SAMPLES = 5000


def calibrate(model: nn.Module, arch: str, data: ImageData) -> None:
    """Run the calibration of a new model, if its architecture has one.

    It gets up to 5,000 normalized images on the CPU, evenly spaced over the training set because folders are sorted by
    class. They are the same on every worker.

    Raises:
        ConfigError: The training images are not held in memory.
    """
    work = registry.calibration(arch, min(data.input.height, data.input.width))
    if work is None:
        return
    if not isinstance(data.train, MemorySplit):
        raise ConfigError(
            f"--arch {arch} computes its first layer from training images in memory, but {data.name}'s are not; "
            f"for a folder of small images add --in-memory always, or choose another model"
        )
    images = data.train.images[:: max(1, -(-len(data.train) // SAMPLES))]
    work(model, Normalizer(data.input, Placement(torch.device("cpu")))(images.cpu()))


DECODING = "cuda"  # the kind of device that decodes images


def load_data(config: TrainConfig, world: World, kept: ImageData | None = None) -> ImageData:
    """Load the data set on every worker; if it must be downloaded, local rank 0 of each node does so first.

    Args:
        kept: The data set of the previous generation.
    """
    name, data = config.data.source, kept
    if name in catalog.NAMED and catalog.NAMED[name].fetched:
        if world.rank_info.local_rank == 0 and not kept:
            data = catalog.load(config.data, download=config.data.download)
        world.barrier()
    data = data or catalog.load(config.data)
    if not len(data.train) or not len(data.val):
        raise DataError(f"{name}: the training and validation sets must not be empty")
    return data


def build_model(config: TrainConfig, data: ImageData) -> nn.Module:
    """Build the model for the classes and channels of the data. Its weights depend only on the seed.

    The weights of calibrated models also depend on the training images.

    Raises:
        ConfigError: The model is unknown, or does not fit the data.
    """
    seed_all(config.seed, 0, 0)
    side = min(data.input.height, data.input.width)
    model = registry.build(config.model.arch, len(data.classes), data.input.channels, side)
    if config.model.is_custom:
        check_model(f"--model {config.model.arch}", model, data)
    else:
        size = getattr(model, "default_cfg", {}).get("input_size")  # timm's
        made = f"; it is made for {size[-1]} x {size[-1]}" if size else ""
        fix = f"{made}; choose another network (`lockstep models` lists them) or, for a folder, another --image-size"
        check_model(f"--arch {config.model.arch}", model, data, fix)
    calibrate(model, config.model.arch, data)
    return model


def place_model(model: nn.Module, config: TrainConfig, precision: Precision, world: World) -> nn.Module:
    """Move the model to the worker's device, in the configured precision and memory format."""
    return precision.prepare(model).to(world.device).to(memory_format=_memory_format(config))


def build_job(
    config: TrainConfig,
    world: World,
    data: ImageData,
    model: nn.Module,
    held: HeldRun | None = None,
    custom: CustomParts | None = None,
) -> Job:
    """Build all parts of a run, and restore its state when resuming.

    Args:
        held: The locked run folder; None: use the configured folder without a lock.

    Raises:
        ConfigError: The configuration contradicts the world or the data, or the workers' jobs differ.
        CheckpointError: The checkpoint to resume is damaged or belongs to another job, or --pretrained does not fit.
    """
    has_custom, custom = custom is not None, custom or CustomParts()
    parameters = list(model.parameters())  # as referenced by a custom optimizer
    accelerator.tune(world.device)
    check_same_job(world, config, data, model)  # before collectives whose number depends on the steps or the weights
    # With --start-epoch the state comes from another run, and this one starts a new folder.
    own = held.folder.path if held and config.run.start_epoch is None else None
    point = find_resume_point(config, world, own)
    held = held or unknown_to_others(config, world)
    notes = list[str]()
    notes += load_pretrained(model, config, world) if point.state is None else []
    precision = build_precision(config.numerics, world.device)
    batching = plan_batches(config, world.size)
    sharding = build_sharding(config, data, batching, world.rank, world.size)
    steps_per_epoch = sharding.steps_per_epoch
    planned = config.epochs * steps_per_epoch
    last_step = min(planned, config.max_steps or planned)
    check_decoding(config, data, world.device.type, f"worker {world.rank}")
    processes = choose_processes(config, world, data.train)
    if config.data.loader_workers == "auto" and not isinstance(data.train, MemorySplit):
        notes.append(f"{count_processes(processes)} per worker (from the number of cores)")
    reader = _build_reader(config, world, data, data.train, precision, processes, config.data.decode == "gpu")
    train_loader = TrainLoader(reader, sharding, world.device, Mixing(config.augment, config.seed))
    val_loader = build_val_loader(config, world, data, precision, batching)
    strategy = build_strategy(config, world, last_step)
    strategy.broadcast([*model.parameters(), *model.buffers()])  # in full precision, which O2 keeps
    if config.parallel.sync_bn:
        strategy.synchronize_batch_norm(model)
        if last_step >= steps_per_epoch:
            check_shares(model, sharding, "add --drop-last")
    model = place_model(model, config, precision, world)
    frozen_norms = freeze(model, config.model.freeze)
    weights = precision.weights_of(model)
    # Before wrapping: torch.compile cannot trace DDP's forward.
    called = cast(nn.Module, torch.compile(model)) if config.model.compile else model
    if config.model.cuda_graph:
        check_capturable(config, model, world.device)
        called = CapturedPasses(model)
    replica = strategy.wrap(called)
    average = build_average(model, weights, config.model.ema_decay)
    optimizer = _build_optimizer(config, custom, parameters, weights, strategy)
    epochs = EpochRecords()
    schedule = _build_rates(config, custom, optimizer, batching, epochs, steps_per_epoch)
    criterion, eval_criterion = _build_losses(config, custom, world)
    measures = Measures(custom.metrics, len(data.classes) if has_custom else 0, world)
    kept_keys = {*COMPUTED_BY, *(SCHEDULED if custom.scheduler else ())} if custom.optimizer is not None else None
    optim = Optimization(criterion, precision, strategy, optimizer, schedule, batching, average, kept_keys)
    session, warnings = begin(point, config, world, held, weights, optim, steps_per_epoch, data)
    progress = session.progress
    epochs.take_all(read_epochs(held.folder, progress.step, world))
    if isinstance(schedule, CustomSchedule):
        notes += schedule.describe_missing(progress.step)
    data_wait = DataWait(advise(data.train, world, processes))
    hooks = build_hooks(custom.callbacks, world)
    clock = StepClock(world.device, publisher.own_board())
    if observer.current:
        observer.current.follow_trainer(clock)
    time_batch_norms(model, clock)
    waits_in = strategy.waits_in
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        waits_in = (*waits_in, "forward", "backward")
    balance = None
    if config.parallel.balance and world.size > 1:
        check_measurable([model], world.device, "--balance")
        balance = Balance(world, train_loader, session.progress.step)
    job = Job(
        config=config,
        world=world,
        session=session,
        network=Network(model, weights, replica, frozen_norms),
        loading=Loading(data, train_loader, val_loader, data_wait),
        optim=optim,
        eval_criterion=eval_criterion,
        measures=measures,
        meter=Meter(world, has_classes=bool(data.classes)),
        clock=clock,
        interval=ReportInterval(clock),
        worker_times=WorkerTimes(world, waits_in),
        balance=balance,
        guard=build_guard(config.numerics, precision, world.device.type),
        notes=[*notes, *describe_frozen(weights)],
        warnings=warnings,
        epochs=epochs,
        hooks=hooks,
    )
    state = TrainingState(world, weights, optimizer, progress, epochs, steps_per_epoch, held.folder.path)
    hooks.begin(state, lambda line: job.say([line]))
    return job


def _build_optimizer(
    config: TrainConfig, custom: CustomParts, parameters: list[nn.Parameter], weights: nn.Module, strategy: Strategy
) -> Optimizer:
    if not any(parameter.requires_grad for parameter in weights.parameters()):
        raise ConfigError(
            "the model has no trainable parameters: all have requires_grad=False or are frozen by --freeze"
        )
    if custom.optimizer is None:
        return build_optimizer(weights, config.optim, strategy)
    return take_optimizer(custom.optimizer, parameters, weights, strategy, config.parallel.shard_optimizer)


def _build_rates(
    config: TrainConfig,
    custom: CustomParts,
    optimizer: Optimizer,
    batching: Batching,
    epochs: EpochRecords,
    steps_per_epoch: int,
) -> Schedule | CustomSchedule:
    peak, _ = peak_rate(config.optim, batching.global_batch)
    if custom.optimizer is None and custom.scheduler is None:
        return build_schedule(config.optim, peak, config.epochs, steps_per_epoch)
    if custom.optimizer is None:
        set_rate(optimizer, peak)
    return CustomSchedule(optimizer, custom.scheduler, custom.scheduler_interval, epochs, steps_per_epoch)


def _build_losses(config: TrainConfig, custom: CustomParts, world: World) -> tuple[Criterion, Criterion]:
    """Return the loss of training and that of evaluations."""
    if custom.loss is None:
        smoothing = config.optim.label_smoothing
        return partial(F.cross_entropy, reduction="none", label_smoothing=smoothing), cross_entropy
    loss = CustomLoss(custom.loss, world.device, per_sample=mixes(config.augment))
    return loss, CustomLoss(custom.loss, world.device)


def build_val_loader(
    config: TrainConfig, world: World, data: ImageData, precision: Precision, batching: Batching
) -> EvalLoader:
    """Return the loader of this worker's validation samples, with the batch size of a training forward pass."""
    one_pass = -(-batching.global_batch // (world.size * batching.accumulate))
    processes = choose_processes(config, world, data.val)
    reader = _build_reader(config, world, data, data.val, precision, processes)
    return EvalLoader(reader, len(data.val), one_pass, world.rank, world.size, world.device)


def check_decoding(config: TrainConfig, data: ImageData, device: str, worker: str) -> None:
    """Reject --decode gpu if the images, or the device of the named worker, do not support it."""
    if config.data.decode != "gpu":
        return
    if not isinstance(data.train, EncodedSplit):
        raise ConfigError(f"--decode gpu: needs image files that are read during training, but {data.name} has none")
    if device != DECODING:
        raise ConfigError(f"--decode gpu: {worker} runs on {device}; leave out --decode")


def _build_reader(
    config: TrainConfig,
    world: World,
    data: ImageData,
    split: Split,
    precision: Precision,
    processes: int,
    on_device: bool = False,
) -> Reader:
    return reader_for(
        split,
        data.input,
        Placement(world.device, precision.input_dtype, _memory_format(config), precision.loss_dtype),
        config.augment,
        seed=config.seed,
        processes=processes,
        skip_corrupt=config.data.skip_corrupt,
        on_device=on_device,
    )


def _memory_format(config: TrainConfig) -> torch.memory_format:
    return torch.channels_last if config.model.channels_last else torch.contiguous_format


def load_pretrained(model: nn.Module, config: TrainConfig, world: World, whole: bool = False) -> list[str]:
    """Load the --pretrained weights and return lines to print; local rank 0 of each node downloads them first.

    Args:
        whole: Reject a different number of classes.
    """
    source, note = config.model.pretrained, ""
    if source is None:
        return []
    if source == "default":
        load = partial(pretrained.load_published, config.model.arch, model, whole)
    else:
        load = partial(pretrained.load_own, Path(source), model, whole)
    if world.rank_info.local_rank == 0:
        note = load()
    world.barrier()
    return [note or load()]
