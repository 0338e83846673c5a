"""Small networks and runs on the embedded digits, for the checks."""

from __future__ import annotations

import dataclasses
import time
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
    """Return a net without batch norm and dropout: its gradient does not depend on how the global batch is sharded."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)
    )


def lively_net() -> nn.Module:
    """Return a net with the state that a resume must restore.

    It has batch norm's buffers, dropout's random state, and a convolution whose weights, and momentum, have another
    layout in channels_last.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout2d(0.1),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )


def normed_net() -> nn.Module:
    """Return a net with batch norm: with synchronized statistics, it does not depend on the number of workers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(512, 10)
    )


def delayed_net() -> nn.Module:
    """Return the plain net with a pause of 50 ms in each backward pass."""
    net = plain_net()
    net.register_forward_hook(_pause_in_backward)
    return net


def _pause_in_backward(net: nn.Module, inputs: Any, output: Any) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: time.sleep(0.05))


NETS = {"delayed": delayed_net, "plain": plain_net, "lively": lively_net, "normed": normed_net}


def small_digits() -> ImageData:
    """Return the first 960 and 120 digits of the splits."""
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
    config = configure(
        **{"device": "cpu" if world.device.type == "cpu" else "gpu", **digits_settings(folder, **settings)}
    )
    with quietly():
        return run_with(config, world, small_digits(), NETS[net]())


def step_losses(folder: Path) -> list[float]:
    """Return the training loss of each step."""
    return [row["loss"] for row in read_records(folder / "metrics.jsonl") if row["kind"] == "step"]


def final_weights(folder: Path) -> bytes:
    """Return the newest checkpoint's weights as bytes."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return (newest / "model.safetensors").read_bytes()
