"""How long does a checkpoint that is written in the background stall training?

    python benchmarks/checkpoint_stall.py [FOLDER]

resnet18 for CIFAR with momentum (11.2 million weights, 89 MB per checkpoint) trains epochs of 6 steps on noise, on one
core: without checkpoints, the same again (which shows the measurement noise), and with a checkpoint that starts before
the first step and is awaited after the last. The extra time of such an epoch is the whole cost of a checkpoint: the
copy in memory, which stalls training (also measured separately), and the work of the thread that checks and writes the
copy on the same core. Bar: at one checkpoint per minute, the total is below 1 % of the time. The bar uses CPU time,
which is steadier on shared cores; wall time also includes the wait for the disk after the last step, which normal
training does not have.
FOLDER: folder of the runs, whose disk is measured (default: the system's temporary folder).
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import quantiles

import torch
from harness import Unit, Work, append_record, argument, compare, existing_folder, keep_memory, pin
from torch import nn
from work import noise

from lockstep.config.schema import TrainConfig
from lockstep.data.sets import ImageData
from lockstep.train.begin import save
from lockstep.train.fit import configure
from lockstep.train.loop import train_epoch
from lockstep.train.network import build_model
from lockstep.train.setup import build_job
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

STEPS, BATCH, ROUNDS = 6, 8, 9
MAX_SECONDS_A_MINUTE = 0.6


class Epochs:
    """Runs epochs of one job and records the time of each epoch and its checkpoint."""

    def __init__(self, config: TrainConfig, data: ImageData, model: nn.Module, run_dir: Path, saves: bool):
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, run_dir=run_dir))
        self._job = build_job(config, World(RankInfo(), torch.device("cpu")), data, deepcopy(model))
        self._saves = saves
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.wall_in_save: list[float] = []

    def turn(self) -> int:
        wall, cpu = time.perf_counter(), time.process_time()
        if self._saves:
            save(self._job)
            self.wall_in_save.append(time.perf_counter() - wall)
        train_epoch(self._job)
        self._job.session.checkpoints.wait()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        return STEPS


def main(folder: Path | None) -> None:
    pin()
    keep_memory()
    common = {"batch_size": BATCH, "epochs": 1000, "lr": 0.01, "schedule": "constant", "device": "cpu"}
    config = configure(**common, keep=1, log_every=1000, track=())
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, arch="resnet18"))
    data = noise(3, 32, STEPS * BATCH)
    model = build_model(config, data)
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        kinds = {"no checkpoint": False, "none, again": False, "a checkpoint": True}
        epochs = {
            kind: Epochs(config, data, model, Path(runs, str(number)), saves)
            for number, (kind, saves) in enumerate(kinds.items())
        }
        contestants: dict[str, Work] = {kind: taken.turn for kind, taken in epochs.items()}
        compare("checkpoint_stall: epochs", contestants, {}, Unit("s per epoch of 6 steps", STEPS), ROUNDS)
    report(epochs["no checkpoint"], epochs["none, again"], epochs["a checkpoint"])


def report(plain: Epochs, again: Epochs, saving: Epochs) -> None:
    """Print and record the cost of one checkpoint, in seconds and as a share of a minute."""
    figures = {
        "noise of the CPU time": over(plain.cpu, plain.cpu, again.cpu),
        "in save(), wall": saving.wall_in_save[1:],
        "total, CPU time": over(plain.cpu, again.cpu, saving.cpu),
        "total, wall": over(plain.wall, again.wall, saving.wall),
    }
    spreads = {name: quantiles(seconds, method="inclusive") for name, seconds in figures.items()}
    print("\ncheckpoint_stall: seconds per checkpoint, median (quartiles); share of training at one per minute")
    for name, (low, median, high) in spreads.items():
        print(f"  {name:24}{median:8.3f} ({low:.3f} to {high:.3f}){100 * median / 60:8.2f} %")
    met = spreads["total, CPU time"][1] <= MAX_SECONDS_A_MINUTE
    bar = f"at most {MAX_SECONDS_A_MINUTE:g} s in total, by CPU time: {'met' if met else 'MISSED'}"
    print(f"  {bar}")
    record = {"unit": "seconds per checkpoint", "seconds": figures, "quartiles": spreads, "bar": bar}
    append_record({"name": "checkpoint_stall: a checkpoint", **record})


def over(first: Sequence[float], second: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return how much longer each turn of `other` took than the mean of the other two, without the first round."""
    return [c - (a + b) / 2 for a, b, c in zip(first, second, other, strict=True)][1:]


if __name__ == "__main__":
    main(argument("folder", existing_folder, None))
