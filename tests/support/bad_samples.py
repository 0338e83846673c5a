"""A training job with one bad sample, which makes the input or a layer's output not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from runs import NETS
from torch import nn

from lockstep.data.sets import MemorySplit, describe_custom
from lockstep.data.sources import digits
from lockstep.errors import NonFiniteLossError
from lockstep.files.jsonl import read_records
from lockstep.seeding import seed_all
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World

SETTINGS = {"epochs": 2, "global_batch_size": 40, "lr": 0.05, "lr_scaling": "none", "log_every": 4, "loader_workers": 0}
TRAIN, VAL, BAD = 200, 50, 34  # epochs of 5 steps; worker 1 sees the bad sample in steps 4 and 6


class Images:
    """The first digits as a user's own set; one image is NaN, or marked for `Touchy`."""

    def __init__(self, split: Any, count: int, bad: int = -1, value: float = 0.0):
        assert isinstance(split, MemorySplit)
        self.classes = [str(number) for number in range(10)]
        self._images, self._labels = split.images[:count].float() / 255, split.labels[:count]
        if bad >= 0:
            self._images[bad] = value

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        return self._images[sample], int(self._labels[sample])


class Touchy(nn.Module):
    """Divides by zero where an image is all 9."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        marked = (images == 9).flatten(1).all(1).view(-1, 1, 1, 1)
        return images / (~marked).to(images.dtype)


def train(world: World, path: Path, value: float, settings: dict[str, Any], net: str = "lively") -> str:
    """Train with a bad sample of this value; return the error that ends the training, if any."""
    seed_all(0, 0, 0)
    data = digits.load()
    sets = describe_custom("mine", Images(data.train, TRAIN, BAD, value), Images(data.val, VAL))
    config = configure(**{**SETTINGS, "run_dir": path, **settings})
    try:
        run_with(config, world, sets, nn.Sequential(Touchy(), NETS[net]()))
    except NonFiniteLossError as error:
        return str(error)
    return ""


def figures(path: Path) -> list[tuple[float, int, int]]:
    """Return the loss, the samples and the skipped steps so far of each logged step."""
    records = read_records(path / "metrics.jsonl")
    return [(each["loss"], each["samples"], each["skipped_steps"]) for each in records if each["kind"] == "step"]


def log(path: Path) -> str:
    return (path / "logs" / "worker-0.log").read_text()
