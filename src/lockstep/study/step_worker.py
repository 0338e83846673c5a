"""A worker process of a study's job: it measures the job's steps, and rank 0 prints the result as a line of JSON."""

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
from lockstep.errors import is_lost_peer
from lockstep.launch.command_workers import WorkerCommand, run_workers
from lockstep.world import accelerator
from lockstep.world.world import World, usable_cores

if TYPE_CHECKING:
    from lockstep.study.points import StepLength
    from lockstep.study.step_jobs import MemoryLimit

MOST = 0.9  # share that workers may use of the memory that is free at their start
# Out-of-memory errors of torch, oneDNN, NumPy and the C++ library.
NO_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "could not create a memory", "Unable to allocate")
# Errors of oneDNN and cuDNN that can have other causes, too.
MAYBE_NO_MEMORY = ("could not create a primitive", "unable to find an engine")


def main(arguments: list[str]) -> int:
    from lockstep.study import step_jobs

    config, length, memory_limit = step_jobs.decode(arguments[0])
    work = partial(_work, config, length, memory_limit)
    return run_workers(
        WorkerCommand(["step_worker", *arguments], work, config.device, backend=config.parallel.dist_backend)
    )


def _work(config: TrainConfig, length: StepLength, memory_limit: MemoryLimit, world: World) -> None:
    from lockstep.study import step_jobs

    try:
        _measure(config, length, memory_limit, world)
    except Exception as error:
        if not is_lost_peer(error):  # the peer or the launcher reports the cause
            lacks_memory = _lacks_memory(error, memory_limit)
            step_jobs.send_result("out_of_memory" if lacks_memory else "error", str(error).partition("\n")[0])
        raise


def _lacks_memory(error: Exception, limit: MemoryLimit) -> bool:
    known = NO_MEMORY if limit is None else NO_MEMORY + MAYBE_NO_MEMORY
    return isinstance(error, MemoryError) or any(message in str(error) for message in known)


def _measure(config: TrainConfig, length: StepLength, memory_limit: MemoryLimit, world: World) -> None:
    from lockstep.study import step_jobs
    from lockstep.study.steps import measure_steps
    from lockstep.train.run_folder import describe_publicly
    from lockstep.train.setup import build_job, build_model, load_data
    from lockstep.world.host_memory import freed_memory_kept

    with tempfile.TemporaryDirectory() as scratch:
        config = replace(config, run=replace(config.run, run_dir=Path(scratch) / "run"))
        data = load_data(config, world)
        with freed_memory_kept(world.device), closing(build_job(config, world, data, build_model(config, data))) as job:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
