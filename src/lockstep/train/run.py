"""One worker's run from start to end: print the setup, train, print the results."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

from lockstep import __version__
from lockstep.config.schema import TrainConfig, check_workers
from lockstep.data.readers import lost_loaders_named
from lockstep.data.sets import ImageData
from lockstep.errors import StoppedError, plural
from lockstep.observe.io_sampling import IoSampler
from lockstep.run.records.run_folder import RunFolder, holding_run, logger, start_log
from lockstep.run.records.trackers import ALWAYS
from lockstep.run.session import Written
from lockstep.train.custom import CustomParts
from lockstep.train.guards.checks import check_same_job, check_training
from lockstep.train.inputs import load_data
from lockstep.train.job import Job
from lockstep.train.loop import Result, train
from lockstep.train.network import build_model
from lockstep.train.run_records import list_left_out
from lockstep.train.setup import build_job
from lockstep.world.generations import is_interruption
from lockstep.world.host_memory import keep_freed_memory
from lockstep.world.world import World

kept_data: dict[Path, ImageData] = {}
"""By run folder, the data set of a run that a loss has interrupted, until it goes on."""


def run(config: TrainConfig, world: World) -> Result:
    """Train as configured. Call it on every worker.

    Raises:
        LockstepError: The run failed; see `lockstep.errors` for the subclasses.
    """
    io = IoSampler(config.run.io_every, world.rank_info.local_rank == 0)  # first, to include loading the data set
    check_same_job(world, config)  # before load_data, which may hang if the workers load different data sets
    with holding_run(config, world) as folder:  # fail early if another job uses the folder
        place = folder.path.absolute()
        data = load_data(config, world, kept_data.pop(place, None))
        try:
            return _run(config, world, data, build_model(config, data), folder, io)
        except Exception as error:
            if is_interruption(error):
                kept_data[place] = data
            raise


def run_with(
    config: TrainConfig, world: World, data: ImageData, model: nn.Module, custom: CustomParts | None = None
) -> Result:
    """Train as `run` does, with a data set and a model that are already loaded."""
    with holding_run(config, world) as folder:
        io = IoSampler(config.run.io_every, world.rank_info.local_rank == 0)
        return _run(config, world, data, model, folder, io, custom)


@lost_loaders_named()  # in the loop, and while the job closes
def _run(
    config: TrainConfig,
    world: World,
    data: ImageData,
    model: nn.Module,
    folder: RunFolder,
    io: IoSampler,
    custom: CustomParts | None = None,
) -> Result:
    keep_freed_memory(world.device)
    check_workers(config, world.size)
    check_training(config, model, data, world.size)
    job = build_job(config, world, data, model, folder, custom)
    start_log(job.session.folder.log(world.rank), world.rank)
    workers = world.gather(_describe_worker(world))
    job.notes.extend(job.session.begin())
    with job.session.stopping.listening():
        try:
            with io.recording(job.session.folder.path, world.rank), closing(job):
                job.session.say([*_introduce(job, workers), *io.notes])
                job.session.say(job.warnings, ALWAYS)
                result = train(job)
                written = job.session.finish(export=True)
                job.session.say(_conclude(job, result, written), ALWAYS)
                written.check("training finished")
        except StoppedError as stop:
            logger.info(str(stop))
            world.barrier()  # when one worker exits, the launcher stops the others, which may still be writing
            raise
    return result


def _describe_worker(world: World) -> str:
    threads = torch.get_num_threads()
    return (
        f"worker {world.rank} of {world.size}: {socket.gethostname()}, process {os.getpid()}, {world.device}, "
        f"{plural(threads, 'thread')}"
    )


def _introduce(job: Job, workers: list[str]) -> list[str]:
    config, progress, optim, data = job.config, job.progress, job.optim, job.loading.data
    sharding = job.loading.train_loader.sharding
    parameters = sum(parameter.numel() for parameter in job.network.model.parameters())
    rest = f", dropping the last {sharding.dropped} samples" if sharding.dropped else ", the last one smaller"
    classes, steps = len(data.classes), job.steps_per_epoch
    named = f", {classes} class{'es' if classes > 1 else ''}" if classes else ""
    exact = sharding.samples % sharding.global_batch == 0
    lines = [
        f"Lockstep {__version__}, torch {torch.__version__}",
        f"{config.model.arch} ({parameters:,} parameters) on "
        f"{data.name} ({len(data.train):,} + {len(data.val):,} {data.noun}{named})",
        *workers,
        f"strategy {optim.strategy.name}{_describe_parallel(config, job.world)}, "
        f"precision {optim.precision.name}, seed {config.seed}",
        f"global batch {optim.batching.global_batch} = {optim.batching.reason}",
        f"{plural(steps, 'step')} per epoch = {sharding.samples:,} / {sharding.global_batch}{'' if exact else rest}",
        f"learning rate {optim.schedule.describe(config.optim, optim.batching.global_batch)}",
        f"run folder {job.session.folder.path}",
    ]
    lines += [*data.notes, *job.notes, *list_left_out(data.left_out)]
    if progress.step:
        epoch = -(-progress.step // job.steps_per_epoch)
        lines.append(f"resumed after step {progress.step:,} (epoch {epoch})")
    job.session.record(
        "run",
        workers=job.world.size,
        hosts=-(-job.world.size // job.world.rank_info.local_size),
        global_batch=optim.batching.global_batch,
        steps_per_epoch=steps,
        peak_lr=optim.schedule.peak,
        arch=config.model.arch,
        data=data.name,
        parameters=parameters,
        items=data.noun,
    )
    return lines


def _describe_parallel(config: TrainConfig, world: World) -> str:
    """Describe the options of data parallelism that are set; "" for one worker."""
    parallel = config.parallel
    if world.size == 1:
        return ""
    options = [f"gradients compressed by {parallel.compress}"] * (parallel.compress != "none")
    options += ["optimizer state sharded"] * parallel.shard_optimizer
    options += ["batch norm over all workers"] * parallel.sync_bn
    return f" ({', '.join(options)})" if options else ""


def _conclude(job: Job, result: Result, written: Written) -> list[str]:
    left_out = job.world.union(job.loading.train_loader.reader.left_out | job.loading.val_loader.reader.left_out)
    noun, workers = job.loading.data.noun, plural(job.world.size, "worker")
    figures = f"loss {result.loss:.4f} (mean of {result.samples:,} validation {noun}, over {workers})"
    best = "best" if job.progress.best_loss is None else f"best loss {job.progress.best_loss:.4f}"
    if job.has_classes:
        right = f"{round(result.top1 * result.samples):,} of {result.samples:,} validation {noun} right"
        figures = f"top-1 {100 * result.top1:.2f} % ({right}, over {workers})"
        best = f"best {100 * result.best_top1:.2f} %"
    return [
        figures,
        f"{plural(f'{result.steps:,}', 'step')}, {result.seconds:,.1f} s of training",
        f"{best} after step {job.progress.best_step:,}; {_describe_weights(job, written.exported_step)}",
        *_describe_target(job),
        *list_left_out(left_out),
    ]


def _describe_weights(job: Job, exported_step: int) -> str:
    """Say which weights were exported; on a full disk, these may be from an earlier step than the best."""
    if exported_step == -1:
        return "its weights were not written"
    if exported_step == job.progress.best_step:
        return f"its weights: {job.session.folder.model}"
    return f"its weights were not written; {job.session.folder.model} has those of step {exported_step:,}"


def _describe_target(job: Job) -> list[str]:
    """Return one line on whether and when --desired-acc was reached; no line without the flag."""
    desired, progress = job.config.run.desired_acc, job.progress
    if desired is None:
        return []
    best, step = f"{100 * progress.best_top1:.2f} %", progress.best_step
    where = f"top-1 {best} after epoch {-(-step // job.steps_per_epoch)}, step {step:,}"
    if progress.best_top1 < desired:
        return [f"desired accuracy {100 * desired:.2f} % not reached: the best is {where}"]
    is_last = step == progress.step  # the time of earlier steps is unknown
    took = f", {timedelta(seconds=round(progress.seconds))} of training" if is_last else ""
    return [f"desired accuracy {100 * desired:.2f} % reached: {where}{took}"]
