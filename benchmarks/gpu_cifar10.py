"""How accurate does the zoo get on CIFAR-10 in a few epochs on one GPU, and how fast?

    python benchmarks/gpu_cifar10.py FOLDER [--minutes 9] [--epochs 15] [NAME ...]

FOLDER holds CIFAR-10 as images, `train/CLASS/` and `test/CLASS/`. ResNet-18 comes first, then `cifar10-fast`, then the
rest of the zoo from the least work to the most, or the networks that are named; what does not fit into the minutes is
left out and said. Each is trained with the recipe cifar10 (its own for cifar10-fast), bf16 and channels_last, and is
one record: accuracy, seconds of training, images a second. Accuracies after 15 epochs are not the quoted ones, which
take 200; and where the images went through JPEG, they are lower besides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import append_record

from lockstep.models.registry import ZOO
from lockstep.records import read_records

FIRST = ("resnet18", "cifar10-fast")
# From the least multiply-adds to the most, as `lockstep models` lists them.
REST = (
    "regnetx_200mf",
    "mobilenetv2",
    "regnety_400mf",
    "vgg16",
    "preactresnet18",
    "resnext29_32x4d",
    "densenet121",
    "simpledla",
    "dla",
    "resnet50",
    "resnext29_2x64d",
    "dpn92",
    "resnet101",
)
RESERVE_SECONDS = 20.0  # to start a run, evaluate and write


def train(folder: Path, name: str, epochs: int, seconds: float, runs: Path) -> dict[str, float] | None:
    """Train one network; None if it takes longer than `seconds`."""
    run, recipe = runs / name, "cifar10-fast" if name == "cifar10-fast" else "cifar10"
    own = [] if recipe == "cifar10-fast" else ["--precision", "bf16", "--epochs", str(epochs)]
    words = ["train", str(folder), "--config", recipe, "-a", name, *own, "--in-memory", "always", "--device", "cuda"]
    command = [sys.executable, "-m", "lockstep", *words, "--checkpoint-epochs", "0", "--run-dir", str(run)]
    try:
        subprocess.run(command, check=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    rows = [row for row in read_records(run / "metrics.jsonl") if row["kind"] == "epoch"]
    trained, evaluated = (rows[index] for index in (-2, -1))
    return {
        "epochs": evaluated["epoch"],
        "top1": evaluated["top1"],
        "train_seconds": evaluated["time_seconds"],
        "images_per_second": trained["images_per_second"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as runs:
        for name in options.names or [name for name in (*FIRST, *REST) if name in ZOO]:
            left = end - time.monotonic() - RESERVE_SECONDS
            row = train(options.folder, name, options.epochs, left, Path(runs)) if left > 0 else None
            print(f"{name}: {json.dumps(row) if row else 'left out, for lack of time'}", flush=True)
            if row:
                append_record({"name": f"gpu_cifar10: {name}", **row})


if __name__ == "__main__":
    main()
