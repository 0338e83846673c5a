"""Does a large batch reach the accuracy of a small one, and what happens without the recommended settings?

    python benchmarks/large_batch.py mnist --data-dir DIR     # DIR/MNIST, as torchvision keeps it
    python benchmarks/large_batch.py FOLDER                   # CIFAR-10: FOLDER/train/CLASS/ and FOLDER/test/CLASS/
    python benchmarks/large_batch.py                          # print the means of recorded runs

Each row is trained with seeds 0, 1 and 2 for the same number of epochs, in one worker with one thread, in bf16, with
two runs at a time. The first row is the recipe at its base batch size. The others have 32 (MNIST) or 16 (CIFAR-10)
times as many samples per step; the second row uses the recommended settings. Each run is one record; recorded runs are
not repeated. Bars: with the recommended settings, the mean is within 0.2 points of the base's on MNIST and within 1.0
on CIFAR-10.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from harness import FOLDER, append_record

from lockstep.files.jsonl import read_records

SEEDS = (0, 1, 2)
AT_A_TIME = 2
NAME = "large_batch"


@dataclass(frozen=True)
class Study:
    """A data set's rows (name and flags): first the base, then the recommended settings, then others."""

    recipe: str
    epochs: int
    bar_points: float
    rows: dict[str, str]


LAMB = "--optimizer lamb --lr 0.02 --wd 0.02 --warmup-epochs 1 --lr-base-batch"
STUDIES = {
    "MNIST": Study(
        "mnist",
        6,
        0.2,
        {
            "32, the recipe": "-b 32",
            "1,024, LAMB": f"-b 1024 {LAMB} 1024",
            "1,024, the base's rate": "-b 1024 --lr-scaling none --lr 0.025",
            "1,024, the rate times 32": "-b 1024",
        },
    ),
    "CIFAR-10": Study(
        "cifar10-small",
        10,
        1.0,
        {
            "32, the recipe": "-b 32",
            "512, the rate times 16": "-b 512",
            "512, LAMB": f"-b 512 {LAMB} 512",
            "512, the base's rate": "-b 512 --lr-scaling none --lr 0.025",
        },
    ),
}


def train(name: str, row: str, seed: int, source: list[str]) -> None:
    """Run one training and record the top-1 of its last evaluation, its steps and its training time."""
    study = STUDIES[name]
    flags = [*study.rows[row].split(), "--config", study.recipe, "--epochs", str(study.epochs), "--precision", "bf16"]
    with tempfile.TemporaryDirectory() as folder:
        run = ["--no-download", "--checkpoint-epochs", "0", "--run-dir", f"{folder}/run", "--seed", str(seed)]
        command = [sys.executable, "-m", "lockstep", "train", *source, *flags, *run]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}, {row}, seed {seed}: {done.stderr}")
        records = list(read_records(Path(folder) / "run" / "metrics.jsonl"))
    last = [record for record in records if record["kind"] == "epoch" and record["split"] == "val"][-1]
    figures = {"top1": last["top1"], "steps": last["step"], "train_seconds": last["time_seconds"]}
    append_record({"name": f"{NAME}: {name}: {row}", "seed": seed, "flags": flags, **figures})
    print(f"{name}, {row}, seed {seed}: {100 * last['top1']:.2f} %", flush=True)


def recorded() -> dict[tuple[str, str, int], float]:
    """Return the recorded top-1 by data set, row and seed."""
    path = FOLDER / "records" / f"{NAME}.jsonl"
    rows = {}
    for record in read_records(path) if path.exists() else []:
        _, name, row = record["name"].split(": ")
        rows[name, row, record["seed"]] = record["top1"]
    return rows


def report() -> None:
    """Print the mean and spread of each row, and whether the bar is met."""
    known = recorded()
    for name, study in STUDIES.items():
        print(f"\n{name}, {study.epochs} epochs: top-1 in %, mean of {len(SEEDS)} seeds (standard deviation)")
        base = None
        for number, row in enumerate(study.rows):
            figures = [100 * known[name, row, seed] for seed in SEEDS if (name, row, seed) in known]
            if len(figures) < len(SEEDS):
                print(f"  {row:28}{len(figures)} of {len(SEEDS)} runs are recorded")
                continue
            base = mean(figures) if base is None else base
            met = "met" if mean(figures) >= base - study.bar_points else "MISSED"
            bar = f"within {study.bar_points} points: {met}" if number == 1 else ""
            print(f"  {row:28}{mean(figures):.2f} ({stdev(figures):.2f})  {mean(figures) - base:+.2f}  {bar}".rstrip())


def main(source: list[str]) -> None:
    if source:
        name = "MNIST" if source[0] == "mnist" else "CIFAR-10"
        known = recorded()
        # Seed by seed, so that an interrupted benchmark leaves complete comparisons.
        missing = [(row, seed) for seed in SEEDS for row in STUDIES[name].rows if (name, row, seed) not in known]
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for run in [pool.submit(train, name, row, seed, source) for row, seed in missing]:
                run.result()
    report()


if __name__ == "__main__":
    main(sys.argv[1:])
