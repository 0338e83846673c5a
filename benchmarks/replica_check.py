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

from harness import Bar, Unit
from work import epoch_of, noise
from workers import compare_in_workers, in_workers

from lockstep.train.fit import configure
from lockstep.train.network import build_model
from lockstep.train.setup import build_job
from lockstep.world.world import World

# network, channels and side of its images, samples per worker and step, steps per turn, rounds
CASES = (("mnist-net", 1, 28, 64, 20, 15), ("resnet18", 3, 32, 8, 2, 9))


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
                contestants[name] = epoch_of(job, steps)
            bars = {"every step": Bar("at most", 2.0)}
            unit = Unit("ms per step", 1000)
            compare_in_workers(world, f"replica_check: {arch}", contestants, bars, unit, rounds)
            world.barrier()


if __name__ == "__main__":
    in_workers(2, main)
