"""How long do 32 epochs of MNIST take with two workers on two cores?

    python benchmarks/mnist_minutes.py DATA_DIR [--runs 3]

The examples' network (5 x 5 convolutions with 10 and 20 channels, max-pooling, dropout, 320-50-10) trains at batch 64
per worker, in float32 and channels_last, with the plain `lockstep train` command: evaluation on the test set after
every epoch, checkpoints, records and TensorBoard. Published times of the same work with the usual pipeline are 499.8 s
on one A100 and 283.9 s on two. Bar: the whole command, including start-up, takes less than 283.9 s.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

from harness import append_record, existing_folder
from whole_commands import time_lockstep

PUBLISHED_SECONDS = {"one A100": 499.8, "two A100": 283.9}
FLAGS = ("-a", "mnist_example:Net", "--epochs", "32", "-b", "64", "-np", "2", "--device", "cpu")
OPTIMIZER = (
    "--lr",
    "0.01",
    "--momentum",
    "0.5",
    "--no-nesterov",
    "--weight-decay",
    "0",
    "--schedule",
    "constant",
    "--channels-last",
)


def train(data_dir: Path, run_dir: Path) -> dict[str, float]:
    path = os.pathsep.join([str(Path(__file__).parent / "peers"), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ["mnist", "--data-dir", str(data_dir), *FLAGS, *OPTIMIZER]
    return time_lockstep(arguments, run_dir, os.environ | {"PYTHONPATH": path})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", type=existing_folder)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(given.data_dir.resolve(), Path(folder, str(run))) for run in range(given.runs)]
    for run in runs:
        print("  ".join(f"{what} {figure:.4g}" for what, figure in run.items()))
    seconds = median(run["command_seconds"] for run in runs)
    bar = (
        f"less than {PUBLISHED_SECONDS['two A100']} s: {'met' if seconds < PUBLISHED_SECONDS['two A100'] else 'MISSED'}"
    )
    print(f"median of the command: {seconds:.1f} s; {bar}")
    append_record({"name": "mnist_minutes", "runs": runs, "published_seconds": PUBLISHED_SECONDS, "bar": bar})


if __name__ == "__main__":
    main()
