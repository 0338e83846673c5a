"""Build a model, give it published or own weights, and place it on the worker's device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from lockstep.config.schema import TrainConfig
from lockstep.data.readers import Normalizer, Placement
from lockstep.data.sets import ImageData, MemorySplit
from lockstep.errors import ConfigError
from lockstep.models import pretrained, registry
from lockstep.seeding import seed_all
from lockstep.train.guards.checks import check_model
from lockstep.train.precision import Precision
from lockstep.world.world import World


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


def place_model(model: nn.Module, config: TrainConfig, precision: Precision, world: World) -> nn.Module:
    """Move the model to the worker's device, in the configured precision and memory format."""
    return precision.prepare(model).to(world.device).to(memory_format=memory_format(config))


def memory_format(config: TrainConfig) -> torch.memory_format:
    return torch.channels_last if config.model.channels_last else torch.contiguous_format
