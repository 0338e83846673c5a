"""A training job in which one phase of each step takes longer on one rank; its records say whom it names."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep.data.sets import describe_custom
from lockstep.diagnosis import stragglers
from lockstep.files.jsonl import read_records
from lockstep.seeding import seed_all
from lockstep.train import Callback, TrainingState
from lockstep.train.custom import CustomParts
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World

STEP_SECONDS = 0.02  # at least, without a delay
PHASES = ("data_wait", "callbacks", "forward", "backward", "optimizer")
BATCH = 16  # per worker


class Slow:
    """Where and how long this worker sleeps, or keeps its device busy, in each step."""

    def __init__(self, phase: str = "", seconds: float = 0.0, spend: Callable[[float], None] = time.sleep) -> None:
        self._phase, self._seconds, self._spend = phase, seconds, spend

    def enter(self, phase: str, share: float = 1.0) -> None:
        if phase == self._phase:
            self._spend(share * self._seconds)


class Images(Dataset[Any]):
    def __init__(self, count: int, slow: Slow) -> None:
        generator = torch.Generator().manual_seed(0)
        self._images = torch.rand(count, 3, 32, 32, generator=generator)
        self._labels = torch.randint(0, 10, (count,), generator=generator)
        self._slow = slow

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Any:
        self._slow.enter("data_wait", 1 / BATCH)
        return self._images[index], int(self._labels[index])


class Net(nn.Module):
    def __init__(self, slow: Slow) -> None:
        super().__init__()
        self._slow = slow
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> Any:
        output = self.layers(images)
        if self.training:
            self._slow.enter("forward")
            output.register_hook(lambda _: self._slow.enter("backward"))
        return output


class SlowCallback(Callback):
    def __init__(self, slow: Slow) -> None:
        self._slow = slow

    def on_step_end(self, run: TrainingState) -> None:
        self._slow.enter("callbacks")


class SlowSGD(torch.optim.SGD):
    slow = Slow()

    def step(self, closure: Any = None) -> Any:
        self.slow.enter("optimizer")
        return super().step(closure)


def train(
    world: World,
    run: Path,
    phase: str,
    rank: int,
    seconds: float,
    settings: dict[str, Any],
    spend: Callable[[float], None] = time.sleep,
    least: int = stragglers.MIN_STEPS,
) -> list[dict[str, Any]]:
    """Train with a delay of one rank; return the records of stragglers, on rank 0.

    Args:
        least: Replaces MIN_STEPS, in this process.
    """
    stragglers.MIN_STEPS = least
    slow = Slow(phase, seconds, spend) if rank == world.rank else Slow()
    report_steps = max(1, round(1.2 / (seconds + STEP_SECONDS)))
    steps = max((stragglers.REPORTS + 1) * report_steps, least + report_steps)
    SlowSGD.slow = slow
    seed_all(0, 0, 0)
    config = configure(
        batch_size=BATCH, epochs=1, log_every=report_steps, track=(), run_dir=run, quiet=True, checkpoint_epochs=0,
        loader_workers=0, **settings,
    )  # fmt: skip
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, data="straggling:Images"))
    data = describe_custom("images", Images(BATCH * world.size * steps, slow), Images(8, Slow()))
    custom = CustomParts(callbacks=[SlowCallback(slow)], optimizer=lambda parameters: SlowSGD(parameters, lr=0.01))
    run_with(config, world, data, Net(slow), custom)
    world.barrier()
    records = list(read_records(run / "metrics.jsonl"))
    return [record for record in records if record["kind"] == "straggler"]
