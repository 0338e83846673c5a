"""Small training jobs for tests, and functions that read their results."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.data.sets import ImageData
from lockstep.data.sources import digits
from lockstep.files.jsonl import read_records
from lockstep.seeding import seed_all
from lockstep.train import Result
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World


def plain_net() -> nn.Module:
    """Return a net without batch norm and dropout: its gradient does not depend on how the global batch is sharded."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 64, 32), nn.Tanh(), nn.Linear(32, 10)
    )


def lively_net() -> nn.Module:
    """Return a net with the state that a resume must restore: batch norm's buffers, and dropout's random state."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(8 * 64, 10),
    )


def normed_net() -> nn.Module:
    """Return a net with batch norm: with synchronized statistics, it does not depend on the number of workers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )


def wide_net() -> nn.Module:
    """Return a net with more weights than DistributedDataParallel's first bucket holds (1 MiB)."""
    return nn.Sequential(nn.Flatten(), *(nn.Linear(*shape) for shape in ((64, 600), (600, 600), (600, 10))))


def deep_net() -> nn.Module:
    """Return a net with a convolution of several channels, whose weights have another layout in channels_last."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )


NETS = {"plain": plain_net, "lively": lively_net, "normed": normed_net, "wide": wide_net, "deep": deep_net}


def small_digits(train: int | None = None, val: int | None = None) -> ImageData:
    """Return the first images of each split of the digits."""
    data = digits.load()
    splits = {
        name: dataclasses.replace(split, images=split.images[:count], labels=split.labels[:count])
        for name, split, count in (("train", data.train, train), ("val", data.val, val))
    }
    return dataclasses.replace(data, **splits)


def train_digits(world: World, net: str, train: int | None, val: int | None, settings: dict[str, Any]) -> Result:
    """Train one of the nets above on the first digits."""
    seed_all(settings.get("seed", 0), 0, 0)
    config = configure(**{"lr_scaling": "none", "track": (), **settings})
    return run_with(config, world, small_digits(train, val), NETS[net]())


def losses(run: Path) -> list[float]:
    """Return the training loss of each logged step."""
    return [record["loss"] for record in read_records(run / "metrics.jsonl") if record["kind"] == "step"]


def final_weights(run: Path) -> bytes:
    """Return the newest checkpoint's weights as bytes."""
    newest = max((run / "checkpoints").glob("step-*"))
    return (newest / "model.safetensors").read_bytes()


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Return the newest checkpoint's weights as tensors."""
    from safetensors.torch import load_file

    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


def all_finite(run: Path) -> bool:
    """Return whether the newest checkpoint holds only finite numbers."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in weights_of(run).values())
