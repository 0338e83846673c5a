"""Small networks and runs on the embedded digits, for the checks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from gpu.jobs import quietly
from lockstep.data.sets import ImageData, MemorySplit
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
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)
    )


def lively_net() -> nn.Module:
    """Batch norm's buffers, dropout's random numbers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout2d(0.1),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )


def normed_net() -> nn.Module:
    """Batch norm without dropout: the same for any number of workers if the statistics are those of all samples."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(512, 10)
    )


NETS = {"plain": plain_net, "lively": lively_net, "normed": normed_net}


def small_digits() -> ImageData:
    """The first digits of each split: 960 and 120."""
    data = digits.load()
    parts: dict[str, Any] = {}
    for name, split, count in (("train", data.train, 960), ("val", data.val, 120)):
        assert isinstance(split, MemorySplit)
        parts[name] = MemorySplit(split.images[:count], split.labels[:count])
    return dataclasses.replace(data, **parts)


def digits_settings(folder: Path, **settings: Any) -> dict[str, Any]:
    common = {"global_batch_size": 96, "epochs": 2, "lr": 0.05, "lr_scaling": "none", "log_every": 1, "track": ()}
    return {**common, "run_dir": folder, **settings}


def train_digits(world: World, net: str, folder: Path, **settings: Any) -> Result:
    """Train a network; its weights depend on the seed alone."""
    seed_all(settings.get("seed", 0), 0, 0)
    config = configure(**{"device": world.device.type, **digits_settings(folder, **settings)})
    with quietly():
        return run_with(config, world, small_digits(), NETS[net]())


def step_losses(folder: Path) -> list[float]:
    """The training loss of each step."""
    return [row["loss"] for row in read_records(folder / "metrics.jsonl") if row["kind"] == "step"]


def final_weights(folder: Path) -> bytes:
    """The newest checkpoint's weights, to the bit."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return (newest / "model.safetensors").read_bytes()
