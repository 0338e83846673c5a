"""The Lockstep workers of memory.py, which train and measure their own memory.

    lockstep run -np N -- python memory_jobs.py Lockstep FOLDER NET STEPS    peak after some steps
    lockstep run -np N -- python memory_jobs.py JOB FOLDER SECONDS           samples over time

Each worker writes FOLDER/RANK.json. JOB is "Lockstep" for the trainer or "hvd loop" for a loop with the Horovod API.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lockstep import hvd
from lockstep.config.schema import TrainConfig
from lockstep.config.values import TimeLeft
from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.errors import StoppedError
from lockstep.run.records.trackers import Tracker
from lockstep.train.fit import configure
from lockstep.train.job import Job
from lockstep.train.loop import train
from lockstep.train.network import build_model
from lockstep.train.setup import build_job
from lockstep.world.host_memory import keep_freed_memory
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World, connect

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from memory_work import (
    EPOCH_STEPS,
    GROWTH_BATCH,
    GROWTH_NET,
    PEAK_BATCH,
    SHAPES,
    Samples,
    batches,
    network,
    noise,
    own_bytes,
)

SUMS = 8  # named tensors that the hvd loop sums per step


class SampleTracker(Tracker):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def advance(self) -> None:
        self._samples.step()


def images_of(net: str, samples: int) -> ImageData:
    channels, side = SHAPES[net]
    pixels, labels = noise(net, samples)
    split, val = MemorySplit(pixels, labels), MemorySplit(pixels[:64], labels[:64])
    spec = InputSpec(channels, side, side, (0.5,) * channels, (0.29,) * channels)
    return ImageData("noise", tuple("0123456789"), split, val, spec)


def lockstep_job(world: World, net: str, samples: int, batch: int, epochs: int, folder: str) -> Job:
    config: TrainConfig = configure(batch_size=batch, epochs=epochs, lr=0.01, lr_scaling="none", device="cpu")
    run = dataclasses.replace(config.run, run_dir=Path(folder))
    config = dataclasses.replace(config, run=run, model=dataclasses.replace(config.model, arch=net))
    data = images_of(net, samples)
    return build_job(config, world, data, build_model(config, data))


def loop_of_hvd(net: str, samples: int, batch: int, goes_on: Callable[[], bool]) -> None:
    """Train until `goes_on` returns False, which must happen after the same step on every worker."""
    hvd.init()
    model = network(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    tensors = [torch.ones(100 * (number + 1)) for number in range(SUMS)]
    for images, labels in batches(net, samples, batch):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        for number, tensor in enumerate(tensors):
            hvd.allreduce(tensor, name=f"sum {number}")
        if not goes_on():
            return


def peak(world: World, net: str, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = world.from_main(folder)
        keep_freed_memory(world.device)  # as `lockstep train` does
        lockstep = lockstep_job(world, net, count * PEAK_BATCH * world.size, PEAK_BATCH, 1, run)
        train(lockstep)
        read = own_bytes()
        lockstep.close()
        world.barrier()
    return read


def growth(world: World, job: str, seconds: float) -> dict[str, Any]:
    samples, end = Samples(), time.monotonic() + seconds
    epoch = EPOCH_STEPS * GROWTH_BATCH
    if job == "hvd loop":
        goes_on = samples.until(lambda: bool(world.from_main(time.monotonic() >= end)))
        loop_of_hvd(GROWTH_NET, epoch, GROWTH_BATCH, goes_on)
        return {"pairs": samples.pairs}
    with tempfile.TemporaryDirectory() as folder:
        run = world.from_main(folder)
        lockstep = lockstep_job(world, GROWTH_NET, epoch * world.size, GROWTH_BATCH, 1_000_000, run)
        lockstep.session.trackers.append(SampleTracker(samples))
        lockstep.session.stopping.end_within(TimeLeft(seconds, "the benchmark"))
        try:
            keep_freed_memory(world.device)
            train(lockstep)
        except StoppedError:
            lockstep.close()
        world.barrier()
    return {"pairs": samples.pairs}


def main(job: str, folder: str, *rest: str) -> None:
    torch.set_num_threads(1)
    rank_info = RankInfo.from_environment()
    with connect(rank_info, "cpu") as world:
        read = peak(world, rest[0], int(rest[1])) if len(rest) == 2 else growth(world, job, float(rest[0]))
        Path(folder, f"{rank_info.rank}.json").write_text(json.dumps(read))
        world.barrier()
        if job == "hvd loop":
            hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
