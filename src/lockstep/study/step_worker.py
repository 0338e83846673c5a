"""A worker process of a study's job: it measures where the time of the job's steps goes, and rank 0 prints the result.

The training loop's steps run at a learning rate of 0, so that every step computes the same. The result is a line of
JSON.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from lockstep.config.schema import TrainConfig
from lockstep.data.loaders import TrainLoader
from lockstep.data.sets import Batch
from lockstep.diagnosis.phases import STEP_PARTS, Phase, Phases
from lockstep.errors import first_line, is_lost_peer
from lockstep.launch.command_workers import WorkerCommand, run_workers
from lockstep.run.records.run_folder import describe_publicly
from lockstep.seeding import seed_all
from lockstep.study import step_jobs
from lockstep.study.figures import Spread, spread
from lockstep.study.points import StepLength
from lockstep.study.step_jobs import MemoryLimit
from lockstep.train.job import Job
from lockstep.train.loop import take_step
from lockstep.train.optim.schedule import Schedule
from lockstep.train.setup import build_job, build_model, load_data
from lockstep.world import accelerator
from lockstep.world.devices import usable_cores
from lockstep.world.host_memory import keep_freed_memory
from lockstep.world.world import World

MOST = 0.9  # share that workers may use of the memory that is free at their start
# Out-of-memory errors of torch, oneDNN, NumPy and the C++ library.
NO_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "could not create a memory", "Unable to allocate")
# Errors of oneDNN and cuDNN that can have other causes, too.
MAYBE_NO_MEMORY = ("could not create a primitive", "unable to find an engine")
BLOCK = 10  # steps per block; metrics are reduced after each, as with a run's --log-every


def main(arguments: list[str]) -> int:
    config, length, memory_limit = step_jobs.decode(arguments[0])
    work = partial(_work, config, length, memory_limit)
    return run_workers(
        WorkerCommand(["step_worker", *arguments], work, config.device, backend=config.parallel.dist_backend)
    )


def _work(config: TrainConfig, length: StepLength, memory_limit: MemoryLimit, world: World) -> None:
    try:
        _measure(config, length, memory_limit, world)
    except Exception as error:
        if not is_lost_peer(error):  # the peer or the launcher reports the cause
            lacks_memory = _lacks_memory(error, memory_limit)
            step_jobs.send_result("out_of_memory" if lacks_memory else "error", first_line(error))
        raise


def _lacks_memory(error: Exception, limit: MemoryLimit) -> bool:
    known = NO_MEMORY if limit is None else NO_MEMORY + MAYBE_NO_MEMORY
    return isinstance(error, MemoryError) or any(message in str(error) for message in known)


def _measure(config: TrainConfig, length: StepLength, memory_limit: MemoryLimit, world: World) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        config = replace(config, run=replace(config.run, run_dir=Path(scratch) / "run"))
        data = load_data(config, world)
        keep_freed_memory(world.device)
        with closing(build_job(config, world, data, build_model(config, data))) as job:
            limit = _limit_memory(world, memory_limit)
            figures = measure_steps(job, length)
            figures |= {"memory_limit_bytes": limit} if limit else {}
            figures |= {
                "data": data.name,
                "arch": config.model.arch,
                "precision": job.optim.precision.name,
                "strategy": job.optim.strategy.name,
                "compress": config.parallel.compress,
                "device": world.device.type,
                "cores": usable_cores(),
                "samples": job.loading.train_loader.sharding.samples,
                "epoch_seconds": job.loading.train_loader.sharding.samples / figures["images_per_second"],
                "global_batch": job.optim.batching.global_batch,
                "environment": describe_publicly(world),
            }
        world.barrier()  # the run folder is in rank 0's scratch folder
    if world.is_main:
        step_jobs.send_result("figures", figures)


def _limit_memory(world: World, limit: MemoryLimit) -> int | None:
    """Limit this process's memory, so that allocations fail before the kernel kills a process.

    Returns:
        The limit in bytes, if one was given or the device is a GPU.
    """
    if limit is None:
        return None
    if world.device.type != "cpu":
        total = accelerator.total_memory(world.device)
        size_bytes = total if limit == "free" else min(limit, total)
        accelerator.limit_memory(world.device, size_bytes)
        return size_bytes
    held = psutil.Process().memory_info().data
    free = int(MOST * psutil.virtual_memory().available / world.rank_info.local_size)
    size_bytes = held + free if limit == "free" else limit
    if size_bytes <= held:
        raise MemoryError(f"libraries, data set and model take {held / 1e9:.2g} GB, more than the limit")
    resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, size_bytes))
    return None if limit == "free" else size_bytes


def measure_steps(job: Job, length: StepLength) -> dict[str, Any]:
    """Measure throughput, the split of a step's time, and memory (collective).

    Returns:
        The measured fields of a `lockstep study scaling` record (docs/howto/studies.md). Seconds are medians over
        steps, averaged over workers.
    """
    job = replace(job, optim=replace(job.optim, schedule=Schedule("constant", peak=0.0, total_steps=1)))
    job.network.train()
    with closing(_batches(job.loading.train_loader)) as batches:
        _take_block(job, batches, length.warmup_steps)
        blocks = [
            _take_block(job, batches, min(BLOCK, length.steps - start)) for start in range(0, length.steps, BLOCK)
        ]
    steps = [step for *_, phases in blocks for step in phases]
    seconds = spread([sum(step.values()) for step in steps])
    return {
        "images_per_second": sum(images for images, *_ in blocks) / sum(duration for _, duration, _ in blocks),
        "images_per_second_spread": spread([images / duration for images, duration, _ in blocks])._asdict(),
        "step_seconds": _mean_spread(job.world, seconds)._asdict(),
        "gradient_bytes": sum(
            parameter.nbytes for parameter in job.network.model.parameters() if parameter.requires_grad
        ),
        "peak_memory_bytes": max(job.world.gather(accelerator.peak_memory(job.world.device))),
        "memory": "resident" if job.world.device.type == "cpu" else "device",
        "split_seconds": _split(job, steps, seconds.median),
    }


def _batches(loader: TrainLoader) -> Generator[tuple[int, Batch]]:
    """Yield this worker's batches and their positions in the epoch, endlessly."""
    epoch = 0
    while True:
        yield from enumerate(loader.epoch(epoch, 0))
        epoch += 1


def _take_block(job: Job, batches: Iterator[tuple[int, Batch]], steps: int) -> tuple[int, float, Sequence[Phases]]:
    """Return the block's images and seconds over all workers, and this worker's phases of each step."""
    images, clock, sharding = 0, job.clock, job.loading.train_loader.sharding
    job.world.barrier()
    start = time.perf_counter()
    for step in range(steps):
        clock.begin("data_wait")
        position, batch = next(batches)
        seed_all(job.config.seed, step, job.world.rank)
        take_step(job, batch, position)
        clock.end()
        images += sharding.count(position)
    job.meter.reduce()  # also waits for the device
    job.meter.forget()
    seconds = max(job.world.gather(time.perf_counter() - start))
    return images, seconds, clock.take()


def _split(job: Job, steps: Sequence[Phases], step_seconds: float) -> dict[str, float]:
    """Return the seconds of each part of a step, as medians; their sum is about the median step's time."""
    # Averaged over workers, as a worker may wait for a slower one.
    parts = {name: _median(job.world, steps, part.phase) for name, part in STEP_PARTS.items() if name != "other"}
    if job.world.size == 1:
        parts["communication_exposed"] = 0.0
    elif "backward" in job.optim.strategy.waits_in:
        del parts["communication_exposed"]  # most of it is in "backward"
    return {**parts, "other": max(0.0, fmean(job.world.gather(step_seconds)) - sum(parts.values()))}


def _median(world: World, steps: Sequence[Phases], phase: Phase) -> float:
    return fmean(world.gather(median(step.get(phase, 0.0) for step in steps)))


def _mean_spread(world: World, seconds: Spread) -> Spread:
    return Spread(*(fmean(part) for part in zip(*world.gather(list(seconds)), strict=True)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
