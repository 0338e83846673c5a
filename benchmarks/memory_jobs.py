"""The workers of memory.py: what each trains, and how it reads its own memory.

    lockstep run -np N -- python memory_jobs.py JOB FOLDER NET STEPS      peak, after some steps
    lockstep run -np N -- python memory_jobs.py JOB FOLDER SECONDS        samples over time

A worker leaves FOLDER/RANK.json. Images are noise, held as bytes; nets are the zoo's.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import hvd
from lockstep.config import TrainConfig
from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.errors import StoppedError
from lockstep.models import registry
from lockstep.place import Place
from lockstep.time_limit import TimeLeft
from lockstep.train.fit import configure
from lockstep.train.loop import train
from lockstep.train.setup import Job, build_job, build_model
from lockstep.train.trackers.base import Tracker, TrackerGroup
from lockstep.world import World, connect

SHAPES = {"digits-net": (1, 8), "mnist-net": (1, 28), "cifar-small": (3, 32), "resnet18": (3, 32)}  # channels, side
PEAK_BATCH, GROWTH_BATCH = 128, 16
GROWTH_NET, EPOCH_STEPS = "digits-net", 50
EVERY_SECONDS = 0.25
SUMS = 8  # tensors that the hvd loop sums by name each step


def own_bytes() -> dict[str, int]:
    """This process's memory: its own (uss), with its share of what others map too (pss), and the most so far."""
    kilobytes: dict[str, int] = {}
    for name in ("smaps_rollup", "status"):
        for line in Path("/proc/self", name).read_text().splitlines():
            words = line.split()
            if len(words) == 3 and words[2] == "kB":
                kilobytes[words[0].rstrip(":")] = int(words[1])
    uss = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {"uss": 1024 * uss, "pss": 1024 * kilobytes["Pss"], "peak": 1024 * kilobytes["VmHWM"]}


class Samples:
    """Reads this process's memory from time to time: [step, bytes] pairs."""

    def __init__(self) -> None:
        self.pairs: list[list[int]] = []
        self._steps, self._next = 0, 0.0

    def step(self) -> None:
        self._steps += 1
        if time.monotonic() >= self._next:
            self.pairs.append([self._steps, own_bytes()["uss"]])
            self._next = time.monotonic() + EVERY_SECONDS


class SampleTracker(Tracker):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def advance(self) -> None:
        self._samples.step()


def noise(net: str, samples: int) -> ImageData:
    torch.manual_seed(0)  # the same for all workers
    channels, side = SHAPES[net]
    pixels = torch.randint(0, 256, (samples, channels, side, side), dtype=torch.uint8)
    split = MemorySplit(pixels, torch.randint(0, 10, (samples,)))
    val = MemorySplit(pixels[:64], split.labels[:64])
    return ImageData(
        "noise", tuple("0123456789"), split, val, InputSpec(channels, side, side, (0.5,) * channels, (0.29,) * channels)
    )


def model_by_hand(net: str) -> nn.Module:
    channels, side = SHAPES[net]
    return registry.build(net, 10, channels, side)


def batches_by_hand(net: str, samples: int, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of noise without end, in a new order each epoch."""
    data = noise(net, samples)
    assert isinstance(data.train, MemorySplit)
    while True:
        for indices in torch.randperm(samples).split(batch):
            yield data.train.images[indices].float().mul_(1 / 74).sub_(1.7), data.train.labels[indices]


def lockstep_job(world: World, net: str, steps: int, batch: int, epochs: int, folder: str) -> Job:
    config: TrainConfig = configure(batch_size=batch, epochs=epochs, lr=0.01, lr_scaling="none", device="cpu")
    run = dataclasses.replace(config.run, run_dir=Path(folder))
    config = dataclasses.replace(config, run=run, model=dataclasses.replace(config.model, arch=net))
    data = noise(net, steps * batch * world.size)
    return build_job(config, world, data, build_model(config, data))


def loop_by_hand(world: World, net: str, samples: int, batch: int, goes_on: Callable[[], bool]) -> None:
    """Until `goes_on` says no, which every worker must say after the same step."""
    model = model_by_hand(net)
    if world.size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for images, labels in batches_by_hand(net, samples, batch):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not goes_on():
            return


def loop_of_hvd(world: World, net: str, samples: int, batch: int, goes_on: Callable[[], bool]) -> None:
    hvd.init()
    model = model_by_hand(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    tensors = [torch.ones(100 * (number + 1)) for number in range(SUMS)]
    for images, labels in batches_by_hand(net, samples, batch):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        for number, tensor in enumerate(tensors):
            hvd.allreduce(tensor, name=f"sum {number}")
        if not goes_on():
            return


LOOPS = {"DDP by hand": loop_by_hand, "hvd loop": loop_of_hvd}


def peak(world: World, job: str, net: str, steps: int) -> dict[str, Any]:
    if job == "Lockstep":
        with tempfile.TemporaryDirectory() as folder:
            run = world.from_main(folder)
            lockstep = lockstep_job(world, net, steps, PEAK_BATCH, 1, run)
            train(lockstep)
            read = own_bytes()
            lockstep.close()
            world.barrier()
        return read
    left = iter(range(steps - 1, -1, -1))
    LOOPS[job](world, net, steps * PEAK_BATCH, PEAK_BATCH, lambda: next(left) > 0)
    return own_bytes()


def growth(world: World, job: str, seconds: float) -> dict[str, Any]:
    samples = Samples()
    if job == "Lockstep":
        with tempfile.TemporaryDirectory() as folder:
            run = world.from_main(folder)
            lockstep = lockstep_job(world, GROWTH_NET, EPOCH_STEPS, GROWTH_BATCH, 1_000_000, run)
            tracker = TrackerGroup([lockstep.tracker, SampleTracker(samples)])
            lockstep = dataclasses.replace(lockstep, tracker=tracker)
            lockstep.stopping.end_within(TimeLeft(seconds, "the benchmark"))
            try:
                train(lockstep)
            except StoppedError:
                lockstep.close()
            world.barrier()
        return {"pairs": samples.pairs}
    ends, steps = time.monotonic() + seconds, 0

    def goes_on() -> bool:
        nonlocal steps
        samples.step()
        steps += 1
        return steps % 100 != 0 or bool(world.from_main(time.monotonic() < ends))

    LOOPS[job](world, GROWTH_NET, EPOCH_STEPS * GROWTH_BATCH, GROWTH_BATCH, goes_on)
    return {"pairs": samples.pairs}


def main(job: str, folder: str, *rest: str) -> None:
    torch.set_num_threads(1)
    place = Place.from_environment()
    with connect(place, "cpu") as world:
        read = peak(world, job, rest[0], int(rest[1])) if len(rest) == 2 else growth(world, job, float(rest[0]))
        Path(folder, f"{place.rank}.json").write_text(json.dumps(read))
        world.barrier()
        if job == "hvd loop":
            hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
