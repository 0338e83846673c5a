"""How long does training stand still for a checkpoint that is written in the background?

    python benchmarks/checkpoint_stall.py [FOLDER]

resnet18 for CIFAR with momentum (11.2 million weights, 89 MB a checkpoint) takes epochs of 6 steps on noise, on one
core: as they are, once more (which shows the noise), and each with a checkpoint begun before its first step and awaited
after its last. What such an epoch takes longer is the whole price of a checkpoint: the copy in memory, for which
training stands still (measured by itself, too), and what the thread that checks and writes it takes from the core
meanwhile. The bar: at one checkpoint a minute, both are under 1 % of the time, by CPU time, which is steadier where
others use the core; the wall's includes the wait for the disk after the last step, which training does not have.
FOLDER: where the runs lie (default: the system's folder for temporary files), so that its disk is measured.
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

from lockstep.config.schema import TrainConfig
from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.train.fit import configure
from lockstep.train.loop import train_epoch
from lockstep.train.saving import save
from lockstep.train.setup import build_job, build_model
from lockstep.world.launcher_environment import Place
from lockstep.world.world import World

STEPS, BATCH, ROUNDS = 6, 8, 9
MOST_SECONDS_A_MINUTE = 0.6


def noise() -> ImageData:
    pixels = torch.randint(0, 256, (STEPS * BATCH, 3, 32, 32), dtype=torch.uint8)
    split = MemorySplit(pixels, torch.randint(0, 10, (STEPS * BATCH,)))
    return ImageData("noise", tuple("0123456789"), split, split, InputSpec(3, 32, 32, (0.5,) * 3, (0.29,) * 3))


class Epochs:
    """Epochs of one job, which note what each and its checkpoint took."""

    def __init__(self, config: TrainConfig, data: ImageData, model: nn.Module, run_dir: Path, saves: bool):
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, run_dir=run_dir))
        self._job = build_job(config, World(Place(), torch.device("cpu")), data, deepcopy(model))
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
        self._job.saving.checkpoints.wait()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        return STEPS


def main(folder: Path | None) -> None:
    pin()
    keep_memory()
    common = {"batch_size": BATCH, "epochs": 1000, "lr": 0.01, "schedule": "constant", "device": "cpu"}
    config = configure(**common, keep=1, log_every=1000, track=())
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, arch="resnet18"))
    data = noise()
    model = build_model(config, data)
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        kinds = {"no checkpoint": False, "none, again": False, "a checkpoint": True}
        epochs = {
            kind: Epochs(config, data, model, Path(runs, str(number)), saves)
            for number, (kind, saves) in enumerate(kinds.items())
        }
        contestants: dict[str, Work] = {kind: taken.turn for kind, taken in epochs.items()}
        compare("checkpoint_stall: epochs", contestants, {}, Unit("s an epoch of 6 steps", STEPS), ROUNDS)
    report(epochs["no checkpoint"], epochs["none, again"], epochs["a checkpoint"])


def report(plain: Epochs, again: Epochs, saving: Epochs) -> None:
    """What one checkpoint costs, as seconds and as a share of the minute until the next."""
    figures = {
        "noise of the CPU time": over(plain.cpu, plain.cpu, again.cpu),
        "in save(), wall": saving.wall_in_save[1:],
        "in all, CPU time": over(plain.cpu, again.cpu, saving.cpu),
        "in all, wall": over(plain.wall, again.wall, saving.wall),
    }
    spreads = {name: quantiles(seconds, method="inclusive") for name, seconds in figures.items()}
    print("\ncheckpoint_stall: seconds a checkpoint, median (quartiles); share of training at one a minute")
    for name, (low, median, high) in spreads.items():
        print(f"  {name:24}{median:8.3f} ({low:.3f} to {high:.3f}){100 * median / 60:8.2f} %")
    met = spreads["in all, CPU time"][1] <= MOST_SECONDS_A_MINUTE
    bar = f"at most {MOST_SECONDS_A_MINUTE:g} s in all, by CPU time: {'met' if met else 'MISSED'}"
    print(f"  {bar}")
    record = {"unit": "seconds a checkpoint", "seconds": figures, "quartiles": spreads, "bar": bar}
    append_record({"name": "checkpoint_stall: a checkpoint", **record})


def over(first: Sequence[float], second: Sequence[float], other: Sequence[float]) -> list[float]:
    """What the other's turns take more than the mean of the two, without the first round."""
    return [c - (a + b) / 2 for a, b, c in zip(first, second, other, strict=True)][1:]


if __name__ == "__main__":
    main(argument("folder", existing_folder, None))
