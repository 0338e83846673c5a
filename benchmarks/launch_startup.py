"""What does it cost to start two workers with `lockstep run`, against torchrun?

    python benchmarks/launch_startup.py

The workers are `true`, so that a turn is the launcher's start, its workers' start and its own end. Both launchers
import torch, which is most of it, and take turns on all cores of the machine.

Bar: `lockstep run -np 2 -- true` takes at most 1.1 of the time of `torchrun --nproc-per-node 2 --no-python true`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

from harness import Bar, Unit, Work, compare

TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--no-python", "true")
LOCKSTEP = ("lockstep", "run", "-np", "2", "--", "true")


def module(folder: str, *words: str) -> Work:
    """Run a module of this interpreter to its end, in a folder of its own."""

    def turn() -> int:
        command = [sys.executable, "-m", *words]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return 1

    return turn


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            "torchrun": module(folder, *TORCHRUN),
            "lockstep run": module(folder, *LOCKSTEP),
        }
        bars = {"lockstep run": Bar("at most", 1.1)}
        compare("launch_startup", contestants, bars, Unit("seconds"), rounds=10)


if __name__ == "__main__":
    main()
