"""How long does a small network need for 80 % on CIFAR-10, with two workers on two cores?

    python benchmarks/cifar_minutes.py FOLDER [--rounds 1]

FOLDER has the images as train/CLASS/*.jpg and test/CLASS/*.jpg. Lockstep runs the plain command with its recipe
cifar10-small: cifar-small, batches of 64 per worker, SGD with Nesterov momentum, a linear warm-up and decay over 10
epochs, label smoothing, random shifts and flips, channels_last; an evaluation and a checkpoint after each epoch. The
peer is a hand-written loop with DistributedDataParallel (peers/cifar_ddp.py) with the same network, memory layout,
batches, optimizer, schedule, augmentation, evaluations and checkpoints. It reads torchvision's ImageFolder in a
DataLoader with one loader process per worker; Lockstep holds such small images in memory by default. Both stop after
the first evaluation with at least 80 %. The contestants alternate in each round; the figures are the seconds of the
whole command, with start-up, and the epochs until 80 %. About 10 minutes per round.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from environments import python_with, torchrun
from harness import FOLDER, append_record, existing_folder, interleave, positive
from whole_commands import time_command, time_lockstep

DESIRED, EPOCHS, WORKERS = 0.8, 10, 2
LOCKSTEP, LOOP = "lockstep train", "DDP loop"
Run = dict[str, float]


def lockstep(folder: Path, desired: float, epochs: int) -> Run:
    arguments = [str(folder), "--config", "cifar10-small", "-np", str(WORKERS), "--device", "cpu"]
    arguments += ["--desired-acc", str(desired), "--epochs", str(epochs)]
    with tempfile.TemporaryDirectory() as runs:
        return time_lockstep(arguments, Path(runs, "run"))


def loop(folder: Path, desired: float, epochs: int) -> Run:
    command = [*torchrun(python_with(), WORKERS), str(FOLDER / "peers" / "cifar_ddp.py"), str(folder)]
    command += ["--desired-acc", str(desired), "--epochs", str(epochs)]
    with tempfile.TemporaryDirectory() as runs:
        seconds, output = time_command(command, Path(runs), os.environ | {"OMP_NUM_THREADS": "1"})
    percents = re.findall(r"top-1 ([\d.]+) %", output)
    return {"command_seconds": seconds, "epochs": len(percents), "top1": float(percents[-1]) / 100}


def report(taken: dict[str, list[Run]], desired: float) -> dict[str, float]:
    """Print each run, and return the medians of the seconds; a run that did not reach the accuracy is marked."""
    for name, runs in taken.items():
        for run in runs:
            missed = "" if run["top1"] >= desired else f", which is less than {desired:.0%}"
            print(f"  {name:16}{run['command_seconds']:7.1f} s, {run['epochs']} epochs, {run['top1']:.2%}{missed}")
    medians = {name: median(run["command_seconds"] for run in runs) for name, runs in taken.items()}
    print(f"  the loop takes {medians[LOOP] / medians[LOCKSTEP]:.2f} times as long")
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=existing_folder)
    parser.add_argument("--rounds", type=positive, default=1)
    parser.add_argument("--epochs", type=positive, default=EPOCHS, help="length of the schedule")
    parser.add_argument("--desired-acc", type=float, default=DESIRED)
    given = parser.parse_args()
    if not 0 < given.desired_acc <= 1:
        parser.error(f"--desired-acc {given.desired_acc:g}: must be above 0 and at most 1")
    for split in ("train", "test"):
        if not (given.folder / split).is_dir():
            parser.error(f"{given.folder}: no folder {split}/ with a folder for each class")
    folder = given.folder.resolve()
    works: dict[str, Callable[[], Run]] = {
        LOCKSTEP: partial(lockstep, folder, given.desired_acc, given.epochs),
        LOOP: partial(loop, folder, given.desired_acc, given.epochs),
    }
    python_with()  # created before anything is timed
    taken = interleave(works, given.rounds, warm_up=0)
    medians = report(taken, given.desired_acc)
    settings = {"desired_acc": given.desired_acc, "epochs": given.epochs}
    append_record({"name": "cifar_minutes", **settings, "runs": taken, "median_seconds": medians})


if __name__ == "__main__":
    main()
