"""How long do 32 epochs of MNIST take two workers on two cores?

    python benchmarks/mnist_minutes.py DATA_DIR [--runs 3]

The examples' network (5 x 5 convolutions with 10 and 20 channels, max-pooling, dropout, 320-50-10) at batch 64 a
worker, in float32 and channels_last, through `lockstep train` as a user types it, with its evaluation of the test set
after every epoch, checkpoints, records and TensorBoard. The same work with the usual pipeline was published as 499.8 s
on one A100 and 283.9 s on two. Bar: the whole command, start included, takes less than 283.9 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from harness import append_record, existing_folder

from lockstep.files.jsonl import read_records

PUBLISHED_SECONDS = {"one A100": 499.8, "two A100": 283.9}
WORDS = ("-a", "mnist_example:Net", "--epochs", "32", "-b", "64", "-np", "2", "--device", "cpu")
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
    """Seconds of the whole command, of the training that the run itself notes, and its last top-1."""
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "mnist",
        "--data-dir",
        str(data_dir),
        "--run-dir",
        str(run_dir),
    ]
    path = os.pathsep.join([str(Path(__file__).parent / "peers"), *filter(None, [os.environ.get("PYTHONPATH")])])
    start = time.monotonic()
    subprocess.run(
        [*command, *WORDS, *OPTIMIZER], check=True, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL
    )
    seconds = time.monotonic() - start
    last = [record for record in read_records(run_dir / "metrics.jsonl") if record["kind"] == "epoch"][-1]
    return {"command_seconds": seconds, "training_seconds": last["time_seconds"], "top1": last["top1"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", type=existing_folder)
    parser.add_argument("--runs", type=int, default=3)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(words.data_dir.resolve(), Path(folder, str(run))) for run in range(words.runs)]
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
