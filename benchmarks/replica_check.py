"""How much does comparing the replicas cost per step?

    python benchmarks/replica_check.py

Two workers with one thread each run real steps of the training loop: mnist-net on batches of 64 per worker, and
resnet18 (the form for small images, 11.2 million weights) on batches of 8. A turn is some steps without the check, or
with the check after every step, as with `--check-replicas 1`. At the default of 100, the cost per step is 1/100 of the
difference. Bar: at most 1 % at the default, and so at most twice the time here. The first contestant competes twice:
the second one's deviation from 1 is the measurement noise.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
from harness import Bar, Unit, Work
from workers import compare_in_workers, in_workers

from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.train.fit import configure
from lockstep.train.job import Job
from lockstep.train.loop import train_epoch
from lockstep.train.setup import build_job, build_model
from lockstep.world.world import World

# network, channels and side of its images, samples per worker and step, steps per turn, rounds
CASES = (("mnist-net", 1, 28, 64, 20, 15), ("resnet18", 3, 32, 8, 2, 9))


def noise(channels: int, side: int, samples: int) -> ImageData:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (samples, channels, side, side), dtype=torch.uint8, generator=generator)
    split = MemorySplit(pixels, torch.randint(0, 10, (samples,), generator=generator))
    spec = InputSpec(channels, side, side, (0.5,) * channels, (0.29,) * channels)
    return ImageData("noise", tuple("0123456789"), split, split, spec)


def trained(job: Job, steps: int) -> Work:
    def turn() -> int:
        train_epoch(job)
        return steps

    return turn


def main(world: World) -> None:
    for arch, channels, side, batch, steps, rounds in CASES:
        with tempfile.TemporaryDirectory() as folder:
            data = noise(channels, side, world.size * batch * steps)
            contestants = {}
            for name, every in (("no check", 0), ("no check, again", 0), ("every step", 1)):
                config = configure(
                    batch_size=batch, epochs=10_000, lr=0.01, schedule="constant", track=(), check_replicas=every
                )
                config = dataclasses.replace(
                    config,
                    model=dataclasses.replace(config.model, arch=arch),
                    run=dataclasses.replace(config.run, run_dir=Path(world.from_main(folder), name)),
                )
                job = build_job(config, world, data, build_model(config, data))
                contestants[name] = trained(job, steps)
            bars = {"every step": Bar("at most", 2.0)}
            unit = Unit("ms per step", 1000)
            compare_in_workers(world, f"replica_check: {arch}", contestants, bars, unit, rounds)
            world.barrier()


if __name__ == "__main__":
    in_workers(2, main)
