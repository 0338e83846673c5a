"""How much does the agreement of all workers on whether to stop cost per step?

    python benchmarks/stopping.py

Two workers with one thread each run the same steps with `StoppingTogether`, as real jobs do, and with `Stopping`, which
has no agreement. A turn is an epoch of 50 steps. `Stopping` competes twice, which shows the measurement noise. The tiny
net is a lower bound for networks in practice; the small net is a typical small convolutional network for a CPU.
"""

from __future__ import annotations

import dataclasses
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from harness import Bar, Unit, Work
from torch import nn
from workers import compare_in_workers, in_workers

from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.train.fit import configure
from lockstep.train.guards.stopping import Stopping, StoppingTogether
from lockstep.train.loop import train_epoch
from lockstep.train.setup import build_job
from lockstep.world.world import World

STEPS, BATCH, WORKERS = 50, 32, 2
SAMPLES = STEPS * BATCH * WORKERS


def noise(side: int) -> ImageData:
    pixels = torch.randint(0, 256, (SAMPLES, 3, side, side), dtype=torch.uint8)
    split = MemorySplit(pixels, torch.randint(0, 10, (SAMPLES,)))
    return ImageData("noise", tuple("0123456789"), split, split, InputSpec(3, side, side, (0.5,) * 3, (0.29,) * 3))


def tiny_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.ReLU(), nn.Linear(32, 10))


def small_net() -> nn.Module:
    first = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    second = [nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def epochs(world: World, model: nn.Module, data: ImageData, stopping: Stopping, run_dir: Path) -> Work:
    config = configure(batch_size=BATCH, epochs=1000, lr=0.01, schedule="constant", run_dir=run_dir, track=())
    job = build_job(config, world, data, model)
    job = dataclasses.replace(job, session=dataclasses.replace(job.session, stopping=stopping))

    def turn() -> int:
        train_epoch(job)
        return STEPS

    return turn


def main(world: World) -> None:
    for name, model, data in (("tiny net", tiny_net(), noise(8)), ("small net", small_net(), noise(32))):
        with tempfile.TemporaryDirectory() as folder:
            kinds = {"none": Stopping(), "none, again": Stopping(), "agreement": StoppingTogether()}
            contestants = {
                kind: epochs(world, deepcopy(model), data, stopping, Path(folder, kind))
                for kind, stopping in kinds.items()
            }
            bars = {"agreement": Bar("at most", 1.02)} if name == "small net" else {}
            compare_in_workers(world, f"stopping: {name}", contestants, bars, Unit("ms per step", 1000), rounds=21)
            world.barrier()


if __name__ == "__main__":
    in_workers(WORKERS, main)
