"""Build everything that the training loop uses from a configuration and a world."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from lockstep.config.schema import TrainConfig
from lockstep.data.sets import ImageData
from lockstep.run.balance import Balance, check_measurable
from lockstep.run.records.run_folder import RunFolder, unknown_to_others
from lockstep.run.replicas import check_shares
from lockstep.run.resume import find_resume_point
from lockstep.train.begin import begin
from lockstep.train.callbacks import TrainingState, build_hooks
from lockstep.train.custom import COMPUTED_BY, SCHEDULED, CustomParts, CustomSchedule, take_optimizer
from lockstep.train.guards.checks import check_same_job
from lockstep.train.guards.nonfinite import build_guard
from lockstep.train.history import EpochRecords, read_epochs
from lockstep.train.inputs import build_loading
from lockstep.train.job import Job, Network, Optimization
from lockstep.train.metrics import Criterion, CustomLoss, Measures, Meter, cross_entropy
from lockstep.train.network import load_pretrained, place_model
from lockstep.train.optim.build import build_optimizer, describe_frozen, freeze, set_rate
from lockstep.train.optim.ema import build_average
from lockstep.train.optim.schedule import Batching, Schedule, build_schedule, build_sharding, peak_rate, plan_batches
from lockstep.train.precision import build_precision
from lockstep.train.strategies import Strategy, build_strategy
from lockstep.train.strategies.captured_passes import CapturedPasses, check_capturable
from lockstep.train.worker_times import WorkerTimes, build_clock
from lockstep.world import accelerator
from lockstep.world.world import World


def build_job(
    config: TrainConfig,
    world: World,
    data: ImageData,
    model: nn.Module,
    folder: RunFolder | None = None,
    custom: CustomParts | None = None,
) -> Job:
    """Build all parts of a run, and restore its state when resuming.

    Args:
        folder: The locked run folder; None: use the configured folder without a lock.

    Raises:
        ConfigError: The configuration contradicts the world or the data, or the workers' jobs differ.
        CheckpointError: The checkpoint to resume is damaged or belongs to another job, or --pretrained does not fit.
    """
    has_custom, custom = custom is not None, custom or CustomParts()
    parameters = list(model.parameters())  # as referenced by a custom optimizer
    accelerator.tune(world.device)
    check_same_job(world, config, data, model)  # before collectives whose number depends on the steps or the weights
    # With --start-epoch the state comes from another run, and this one starts a new folder.
    own = folder.path if folder and config.run.start_epoch is None else None
    point = find_resume_point(config, world, own)
    folder = folder or unknown_to_others(config, world)
    notes = list[str]()
    notes += load_pretrained(model, config, world) if point.state is None else []
    precision = build_precision(config.numerics, world.device)
    batching = plan_batches(config, world.size)
    sharding = build_sharding(config, data, batching, world.rank, world.size)
    steps_per_epoch = sharding.steps_per_epoch
    planned = config.epochs * steps_per_epoch
    last_step = min(planned, config.max_steps or planned)
    loading, lines = build_loading(config, world, data, sharding, precision, batching)
    notes += lines
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
    criterion, eval_criterion = _build_losses(config, custom, world, mixes=sharding.together > 1)
    measures = Measures(custom.metrics, len(data.classes) if has_custom else 0, world)
    kept_keys = {*COMPUTED_BY, *(SCHEDULED if custom.scheduler else ())} if custom.optimizer is not None else None
    optim = Optimization(criterion, precision, strategy, optimizer, schedule, batching, average, kept_keys)
    session, warnings = begin(point, config, world, folder, weights, optim, steps_per_epoch, data)
    progress = session.progress
    epochs.take_all(read_epochs(folder, progress.step, world))
    if isinstance(schedule, CustomSchedule):
        notes += schedule.describe_missing(progress.step)
    state = TrainingState(world, weights, optimizer, progress, epochs, steps_per_epoch, folder.path)
    hooks = build_hooks(custom.callbacks, world, state, session.say)
    clock = build_clock(world.device, model)
    waits_in = strategy.waits_in
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        waits_in = (*waits_in, "forward", "backward")
    balance = None
    if config.parallel.balance and world.size > 1:
        check_measurable([model], world.device, "--balance")
        balance = Balance(world, loading.train_loader, progress.step)
    return Job(
        config=config,
        world=world,
        session=session,
        network=Network(model, weights, replica, frozen_norms),
        loading=loading,
        optim=optim,
        eval_criterion=eval_criterion,
        measures=measures,
        meter=Meter(world, has_classes=bool(data.classes)),
        clock=clock,
        worker_times=WorkerTimes(world, clock, waits_in),
        balance=balance,
        guard=build_guard(config.numerics, precision, world.device.type),
        notes=[*notes, *describe_frozen(weights)],
        warnings=warnings,
        epochs=epochs,
        hooks=hooks,
    )


def _build_optimizer(
    config: TrainConfig, custom: CustomParts, parameters: list[nn.Parameter], weights: nn.Module, strategy: Strategy
) -> Optimizer:
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


def _build_losses(config: TrainConfig, custom: CustomParts, world: World, mixes: bool) -> tuple[Criterion, Criterion]:
    """Return the loss of training and that of evaluations."""
    if custom.loss is None:
        smoothing = config.optim.label_smoothing
        return partial(F.cross_entropy, reduction="none", label_smoothing=smoothing), cross_entropy
    loss = CustomLoss(custom.loss, world.device, per_sample=mixes)
    return loss, CustomLoss(custom.loss, world.device)
