"""A small training run in this process that calls functions at given steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runs import NETS, small_digits
from torch import nn

from lockstep.files.jsonl import read_records
from lockstep.run.checkpoints import checkpoint_folder, checkpoint_format
from lockstep.seeding import seed_all
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

STEPS = 60  # 3 epochs of 20, whose records fill a few pages


class Doing(nn.Module):
    """A network that calls functions before the forward pass of given training steps, counted from 1."""

    def __init__(self, actions: dict[int, Callable[[], None]]):
        super().__init__()
        self.net, self._actions, self._step = NETS["plain"](), actions, 0

    def forward(self, images: torch.Tensor) -> Any:
        if self.training:
            self._step += 1
            self._actions.get(self._step, lambda: None)()
        return self.net(images)


def train(path: Path, actions: dict[int, Callable[[], None]], world: World | None = None, **settings: Any) -> None:
    """Train, in one worker or several; every worker calls the functions."""
    seed_all(0, 0, 0)
    common = {"epochs": 3, "batch_size": 13, "lr": 0.05, "log_every": 1, "checkpoint_steps": 5, "keep": 2}
    config = configure(**{**common, "io_every": 0, "run_dir": path, **settings})
    run_with(config, world or World(RankInfo(), torch.device("cpu")), small_digits(260, 50), Doing(actions))


def recorded_steps(path: Path) -> list[int]:
    damaged: list[int] = []
    records = list(read_records(path / "metrics.jsonl", damaged.append))
    assert not damaged
    return [record["step"] for record in records if record["kind"] == "step"]


def newest_step(path: Path) -> int:
    found, problems = checkpoint_folder.newest_sound(path / "checkpoints")
    assert found is not None
    assert not problems
    return checkpoint_format.load(found).step
