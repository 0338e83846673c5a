"""What a study starts as the workers of a job: they measure its steps, and rank 0 prints a line of JSON."""

from __future__ import annotations

import resource
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lockstep.config.schema import TrainConfig
from lockstep.errors import tells_of_lost_peer
from lockstep.launch.command_workers import WorkerCommand, run_workers
from lockstep.world import accelerator
from lockstep.world.world import World, usable_cores

if TYPE_CHECKING:
    from lockstep.study.points import StepLength
    from lockstep.study.step_jobs import MemoryLimit

MOST = 0.9  # of the memory that is free when a worker starts
# How torch, oneDNN, NumPy and the C++ library say that there is no more memory.
NO_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "could not create a memory", "Unable to allocate")
# What oneDNN and cuDNN say of it, but of other things, too.
MAYBE_NO_MEMORY = ("could not create a primitive", "unable to find an engine")


def main(words: list[str]) -> int:
    from lockstep.study import step_jobs

    config, length, memory_limit = step_jobs.decode(words[0])
    work = partial(_work, config, length, memory_limit)
    return run_workers(
        WorkerCommand(["step_worker", *words], work, config.device, backend=config.parallel.dist_backend)
    )


def _work(config: TrainConfig, length: StepLength, memory_limit: MemoryLimit, world: World) -> None:
    from lockstep.study import step_jobs

    try:
        _measure(config, length, memory_limit, world)
    except Exception as error:
        if not tells_of_lost_peer(error):  # which follows from what the other, or the launcher, says
            lacks_memory = _lacks_memory(error, memory_limit)
            step_jobs.tell("out_of_memory" if lacks_memory else "error", str(error).partition("\n")[0])
        raise


def _lacks_memory(error: Exception, limit: MemoryLimit) -> bool:
    known = NO_MEMORY if limit is None else NO_MEMORY + MAYBE_NO_MEMORY
    return isinstance(error, MemoryError) or any(words in str(error) for words in known)


def _measure(config: TrainConfig, length: StepLength, memory_limit: MemoryLimit, world: World) -> None:
    from lockstep.study import step_jobs
    from lockstep.study.steps import measure_steps
    from lockstep.train.monitoring.environment import describe_publicly
    from lockstep.train.setup import build_job, build_model, load_data

    with tempfile.TemporaryDirectory() as scratch:
        config = replace(config, run=replace(config.run, run_dir=Path(scratch) / "run"))
        data = load_data(config, world)
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
                "global_batch": job.optim.batching.global_batch,
                "environment": describe_publicly(world),
            }
        world.barrier()  # rank 0's scratch folder is the run's
    if world.is_main:
        step_jobs.tell("figures", figures)


def _limit_memory(world: World, limit: MemoryLimit) -> int | None:
    """Let allocations fail beyond a limit, instead of the system ending whichever process it likes.

    Returns:
        The limit in bytes, if one was given or a GPU has it.
    """
    if limit is None:
        return None
    if world.device.type != "cpu":
        total = accelerator.total_memory(world.device)
        size_bytes = total if limit == "free" else min(limit, total)
        accelerator.limit_memory(world.device, size_bytes)
        return size_bytes
    held = psutil.Process().memory_info().data
    free = int(MOST * psutil.virtual_memory().available / world.place.local_size)
    size_bytes = held + free if limit == "free" else limit
    if size_bytes <= held:
        raise MemoryError(f"the libraries, the data set and the model alone take {held / 1e9:.2g} GB")
    resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, size_bytes))
    return None if limit == "free" else size_bytes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
