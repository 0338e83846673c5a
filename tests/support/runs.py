"""Small training jobs for tests, and what they leave behind."""

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
    """No batch norm and no dropout: its gradient is that of the global batch, however that is shared out."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * 64, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def lively_net() -> nn.Module:
    """Everything that a resume must get right: batch norm's buffers, dropout's random numbers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(8 * 64, 10),
    )


def normed_net() -> nn.Module:
    """Batch norm without dropout: the same for any number of workers if the statistics are those of all samples."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )


def wide_net() -> nn.Module:
    """More weights than DistributedDataParallel puts into its first bucket (1 MiB)."""
    return nn.Sequential(nn.Flatten(), *(nn.Linear(*shape) for shape in ((64, 600), (600, 600), (600, 10))))


NETS = {"plain": plain_net, "lively": lively_net, "normed": normed_net, "wide": wide_net}


def small_digits(train: int | None = None, val: int | None = None) -> ImageData:
    """The first images of each split of the digits."""
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
    """The training loss of each logged step."""
    return [record["loss"] for record in read_records(run / "metrics.jsonl") if record["kind"] == "step"]


def final_weights(run: Path) -> bytes:
    """The weights of the newest checkpoint, to the bit."""
    newest = max((run / "checkpoints").glob("step-*"))
    return (newest / "model.safetensors").read_bytes()


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    from safetensors.torch import load_file

    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


def all_finite(run: Path) -> bool:
    """Whether the newest checkpoint holds only finite numbers."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in weights_of(run).values())
