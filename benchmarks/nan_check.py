"""How much does checking for NaN cost per step?

    python benchmarks/nan_check.py

One process, one thread, one core, real steps of the training loop: mnist-net on batches of 128, and resnet18 (the form
for small images, 11.2 million weights, 62 tensors) on batches of 16, without a check and with each choice of --on-nan.
Bars for "stop", by CPU time: at most 1.01 for resnet18 and 1.03 for mnist-net. The first contestant competes twice: the
second one's deviation from 1 is the measurement noise.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
from harness import Bar, Unit, compare, keep_memory, pin
from work import epoch_of, noise

from lockstep.train.fit import configure
from lockstep.train.guards.nonfinite import Skip, Watch
from lockstep.train.job import Guard
from lockstep.train.network import build_model
from lockstep.train.setup import build_job
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

# network, channels and side of its images, samples per step, steps per turn, rounds, bar
CASES = (("mnist-net", 1, 28, 128, 20, 41, 1.03), ("resnet18", 3, 32, 16, 3, 15, 1.01))


def main() -> None:
    pin()
    keep_memory()
    for arch, channels, side, batch, steps, rounds, most in CASES:
        with tempfile.TemporaryDirectory() as folder:
            data = noise(channels, side, batch * steps)
            contestants = {}
            for name, guard in (("no check", Guard), ("no check, again", Guard), *KINDS.items()):
                config = configure(
                    batch_size=batch, epochs=10_000, lr=0.01, schedule="constant", track=(), run_dir=Path(folder, name)
                )
                config = dataclasses.replace(config, model=dataclasses.replace(config.model, arch=arch))
                job = build_job(config, World(RankInfo(), torch.device("cpu")), data, build_model(config, data))
                contestants[name] = epoch_of(dataclasses.replace(job, guard=guard()), steps)
            bars = {"stop": Bar("at most", most, "cpu")}
            compare(f"nan_check: {arch}", contestants, bars, Unit("ms per step", 1000), rounds)


KINDS = {"stop": Watch, "skip": Skip}

if __name__ == "__main__":
    main()
