"""Training jobs of the suite, built directly from Lockstep's parts so that several jobs share one loaded data set."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gpu.device import CHOICE, DEVICE, ON_GPU, synchronize
from lockstep.config import recipes
from lockstep.config.schema import TrainConfig
from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.seeding import seed_all
from lockstep.train.job import Job
from lockstep.train.loop import take_step, train
from lockstep.train.network import build_model
from lockstep.train.setup import build_job
from lockstep.world import accelerator
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

WARMUP_STEPS = 3


class Trained(NamedTuple):
    """The result of a run. The training time excludes evaluation and, as in airbench, warm-up."""

    top1: float
    train_seconds: float
    whole_seconds: float  # including evaluations
    warmup_seconds: float  # compilation and the first steps
    build_seconds: float  # model, optimizer, and copying the images to the device
    steps: int
    images_per_second: float


def one_worker() -> World:
    return World(RankInfo(), accelerator.current() if ON_GPU else DEVICE)


def noise(samples: int, side: int, classes: int = 10) -> ImageData:
    """Return random images on the device."""
    pixels = torch.randint(0, 256, (samples, 3, side, side), dtype=torch.uint8, device=DEVICE)
    split = MemorySplit(pixels, torch.randint(0, classes, (samples,), device=DEVICE))
    few = MemorySplit(pixels[:64], split.labels[:64])
    names = tuple(map(str, range(classes)))
    return ImageData("noise", names, split, few, InputSpec(3, side, side, (0.5,) * 3, (0.25,) * 3))


def few(data: ImageData, samples: int) -> ImageData:
    """Return a data set with only the first images, for a test of the suite on a CPU."""
    splits: dict[str, Any] = {}
    for name in ("train", "val"):
        split = getattr(data, name)
        assert isinstance(split, MemorySplit)
        splits[name] = MemorySplit(split.images[:samples], split.labels[:samples])
    return dataclasses.replace(data, **splits)


def recipe(name: str, arch: str | None = None, **settings: Any) -> TrainConfig:
    """Return a recipe with changed values, by field name without the group; it has no trackers and no checkpoints."""
    config = recipes.load(name, arch)
    if arch:
        settings["arch"] = arch
    return changed(config, **{"track": (), "checkpoint_epochs": 0, **settings})


def changed(config: TrainConfig, **settings: Any) -> TrainConfig:
    """Return a configuration with changed values, by field name without the group."""
    groups: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for name, value in settings.items():
        if hasattr(config, name):
            top[name] = value
            continue
        parts = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
        group = next(key for key, part in parts if dataclasses.is_dataclass(part) and hasattr(part, name))
        groups.setdefault(group, {})[name] = value
    replaced = {key: dataclasses.replace(getattr(config, key), **values) for key, values in groups.items()}
    return dataclasses.replace(config, **top, **replaced)


@contextmanager
def opened(config: TrainConfig, data: ImageData, model: nn.Module | None = None) -> Iterator[Job]:
    """Build a job with one worker in a temporary folder, and close it when the context exits."""
    with tempfile.TemporaryDirectory() as folder:
        config = changed(config, run_dir=Path(folder) / "run", device=CHOICE)
        with closing(build_job(config, one_worker(), data, model or build_model(config, data))) as job:
            yield job


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress output to stdout."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def warm_up(job: Job, steps: int = WARMUP_STEPS) -> float:
    """Take some steps and undo them, so that compilation and the choice of kernels are done; return the seconds."""
    start = time.perf_counter()
    weights, buffers = copy.deepcopy(job.network.weights.state_dict()), copy.deepcopy(job.network.model.state_dict())
    job.network.replica.train()
    last = job.steps_per_epoch - 1  # may be smaller, and then a compiled network is compiled again
    for first, count in ((0, min(steps, last)), (last, 1)):
        with closing(job.loading.train_loader.epoch(0, first)) as batches:  # type: ignore[type-var]
            for position in range(first, first + count):
                seed_all(job.config.seed, 0, 0)
                take_step(job, next(batches), position)
    job.guard.report(job)  # reads the meter's losses if a gradient was not finite
    job.meter.reduce()  # forgets the losses
    job.optim.optimizer.state.clear()
    job.network.weights.load_state_dict(weights)
    if job.network.model is not job.network.weights:
        job.network.model.load_state_dict(buffers)
    synchronize()
    return time.perf_counter() - start


def run(config: TrainConfig, data: ImageData, warmed: bool = True) -> Trained:
    """Train to the end and return the result."""
    start = time.perf_counter()
    with opened(config, data) as job:
        synchronize()
        build_seconds = time.perf_counter() - start
        warmup_seconds = warm_up(job) if warmed else 0.0
        start = time.perf_counter()
        with quietly():
            result = train(job)
        synchronize()
        whole = time.perf_counter() - start
        images = result.steps / job.steps_per_epoch * len(data.train)
    return Trained(
        result.top1, result.seconds, whole, warmup_seconds, build_seconds, result.steps, images / result.seconds
    )


def free_memory() -> None:
    """Release the memory that earlier jobs have left."""
    torch._dynamo.reset()
    gc.collect()
    accelerator.empty_cache()
