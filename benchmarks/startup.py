"""How long does a command take to its first step, compared with torchrun and a script that only imports torch?

    python benchmarks/startup.py [ROUNDS] [WORKERS ...]

All train one step of digits-net at 64 images per worker and exit. The peer, benchmarks/peers/first_step.py, uses random
images and has no evaluation, records or checkpoint; with one worker, it also runs without torchrun. Lockstep runs
`lockstep train digits --max-steps 1`, which loads the digits, augments, records, evaluates and saves, and the peer's
script under `lockstep run`. A turn is one command, on all cores, with three figures: the seconds to the end of the
first step, as written by the peer or in metrics.jsonl; the seconds to the end of the command; and the CPU time of all
its processes. For the launcher alone, with workers that do nothing, see cost_growth.py; for files and memory of its
workers, see one_import.py.

For the bars of `lockstep train` relative to torchrun, see BARS. About 10 minutes with 1, 2 and 4 workers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import FOLDER, Bar, childrens_cpu_seconds, rounds
from readings import Reading, compare_readings

PEER = str(FOLDER / "peers" / "first_step.py")
FIRST_STEP, END, CPU = "to the first step", "to the end", "CPU time"
BARS = {
    1: {FIRST_STEP: 1.1},
    2: {FIRST_STEP: 0.75, CPU: 0.5},
    4: {FIRST_STEP: 0.45, CPU: 0.25},
    8: {FIRST_STEP: 0.32, CPU: 0.2},
    16: {FIRST_STEP: 0.22, CPU: 0.15},
}


def timed(
    arguments: list[str],
    first_step: Callable[[Path], float],
    prepare: Callable[[Path], object] = lambda folder: None,
) -> Reading:
    """Return a reading that runs Python with the arguments in a temporary folder, whose path replaces FOLDER in them.

    Args:
        first_step: Returns the Unix time of the end of the first step, from files that the command wrote to the folder.
        prepare: Prepares the folder before the measurement.
    """

    def turn() -> dict[str, float]:
        with TemporaryDirectory() as folder:
            prepare(Path(folder))
            command = [sys.executable, *(argument.replace("FOLDER", folder) for argument in arguments)]
            cpu, began = childrens_cpu_seconds(), time.time()
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            ended, cpu = time.time(), childrens_cpu_seconds() - cpu
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
            return {FIRST_STEP: first_step(Path(folder)) - began, END: ended - began, CPU: cpu}

    return turn


def of_peer(folder: Path) -> float:
    return float((folder / "mark").read_text())


def of_run(folder: Path) -> float:
    """Return the time of the last step record."""
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return float([record["unix_time"] for record in records if record["kind"] == "step"][-1])


def first_steps(workers: int) -> dict[str, Reading]:
    ours = ["-m", "lockstep", "train", "digits", "-np", str(workers), "--device", "cpu", "-b", "64"]
    ours += ["--optimizer", "sgd", "--max-steps", "1", "--run-dir", "FOLDER/run"]
    many = str(workers)
    contestants = {
        "torchrun": timed(["-m", "torch.distributed.run", "--nproc-per-node", many, PEER, "FOLDER/mark"], of_peer),
        "lockstep train": timed(ours, of_run),
        "lockstep run": timed(
            ["-m", "lockstep", "run", "-np", many, "--", sys.executable, PEER, "FOLDER/mark"], of_peer
        ),
    }
    if workers == 1:
        contestants["python, no launcher"] = timed([PEER, "FOLDER/mark"], of_peer)
    return contestants


def main(rounds: int, sizes: Sequence[int]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun does for more than one worker
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # so that processes can use cached bytecode
    for workers in sizes:
        name = f"startup: first step, {workers} worker{'s' * (workers > 1)}"
        bars = {(figure, "lockstep train"): Bar("at most", most) for figure, most in BARS.get(workers, {}).items()}
        compare_readings(name, first_steps(workers), bars, "seconds", rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=rounds, nargs="?", default=5)
    parser.add_argument("workers", type=int, nargs="*", default=[1, 2, 4])
    given = parser.parse_args()
    main(given.rounds, given.workers)
