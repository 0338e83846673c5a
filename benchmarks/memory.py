"""How much memory does a worker use, at its peak and over time, compared with a hand-written DDP loop?

    python benchmarks/memory.py peak [ROUNDS]
    python benchmarks/memory.py growth [SECONDS]

peak: mnist-net, cifar-small and resnet18 at batches of 128 from memory, on one worker and on two. A turn is a job of
some steps. Its figures are the maximum over workers of memory used only by the worker at the end (USS), of USS plus its
share of shared memory (PSS), and of the peak of resident memory (VmHWM). Lockstep's loop also evaluates and saves a
checkpoint. Last, the USS of all processes except two idle workers, for `lockstep run` and torchrun.
Bar: at most 1.1 times the loop's peak, and at most 1.25 times torchrun's USS. About 5 minutes.

growth: two workers train digits-net on batches of 16 for 75 seconds: Lockstep's trainer, whose epochs of 50 steps end
with an evaluation, records, TensorBoard and a checkpoint; a loop with hvd.DistributedOptimizer that also sums eight
named tensors per step; and a hand-written DDP loop. USS is sampled four times per second. The first quarter is dropped;
the figure is the slope of a line through the means of twelve equal parts of the rest, with its 95 % confidence
interval. The slope of the second half alone is smaller if growth levels off. About 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, mean
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from harness import FOLDER, Bar, append_record, rounds
from readings import Reading, compare_readings

DDP_LOOP = "hand-written DDP"
STEPS = {"mnist-net": 20, "cifar-small": 10, "resnet18": 2}
ROUNDS, SECONDS = 2, 75.0
PARTS = 12
T_95 = {4: 2.776, 10: 2.228}  # Student's t for 95 %, by degrees of freedom
MEGABYTE = 1e6


def run_workers(workers: int, job: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a job and return the JSON that each worker writes to the temporary folder."""
    with TemporaryDirectory() as folder:
        script = ("peers/memory_loop.py",) if job == DDP_LOOP else ("memory_jobs.py", job)
        command = [sys.executable, "-m", "lockstep", "run", "-np", str(workers), "--"]
        command += [sys.executable, str(FOLDER / script[0]), *script[1:], folder, *arguments]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(workers)]


def peak_of(job: str, net: str, workers: int) -> Reading:
    def turn() -> dict[str, float]:
        read = run_workers(workers, job, net, str(STEPS[net]))
        return {name: max(each[name] for each in read) / MEGABYTE for name in ("uss", "pss", "peak")}

    return turn


def launcher_of(*command: str) -> Reading:
    """Return a reading of the memory of a launcher's processes while its two workers sleep."""

    def turn() -> dict[str, float]:
        with TemporaryDirectory() as folder:
            script = Path(folder, "idle.py")
            script.write_text(
                f"import os, time\nopen(f'{folder}/{{os.environ[\"RANK\"]}}', 'w').write(str(os.getpid()))\n"
                f"while not os.path.exists('{folder}/end'): time.sleep(0.1)\n"
            )
            launcher = psutil.Popen(
                [sys.executable, "-m", *command, str(script)],
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while not all(Path(folder, rank).exists() for rank in "01"):
                if launcher.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} exited before its workers started")
                time.sleep(0.1)
            time.sleep(1.0)
            workers = {int(Path(folder, rank).read_text()) for rank in "01"}
            others = [each for each in launcher.children(recursive=True) if each.pid not in workers]
            uss = sum(each.memory_full_info().uss for each in (launcher, *others))
            Path(folder, "end").touch()
            launcher.wait()
        return {"uss": uss / MEGABYTE}

    return turn


def peaks(rounds: int) -> None:
    for net in STEPS:
        for workers in (1, 2):
            contestants = {job: peak_of(job, net, workers) for job in (DDP_LOOP, "Lockstep")}
            name = f"memory: {net}, {workers} worker{'s' * (workers > 1)}"
            compare_readings(
                name, contestants, {("peak", "Lockstep"): Bar("at most", 1.1)}, "MB per worker", rounds, warm_up=0
            )
    launchers = {
        "torchrun": launcher_of("torch.distributed.run", "--nproc-per-node", "2"),
        "lockstep run": launcher_of("lockstep", "run", "-np", "2", "--", sys.executable),
    }
    bars = {("uss", "lockstep run"): Bar("at most", 1.25)}
    compare_readings("memory: launcher", launchers, bars, "MB", rounds, warm_up=0)


def slope(pairs: Sequence[Sequence[int]], parts: int) -> tuple[float, float]:
    """Return the growth in bytes per step and half its 95 % confidence interval, fitted to means of equal parts."""
    edges = [len(pairs) * part // parts for part in range(parts + 1)]
    means = [[mean(column) for column in zip(*pairs[a:b], strict=True)] for a, b in pairwise(edges)]
    steps, sizes = zip(*means, strict=True)
    line = linear_regression(steps, sizes)
    off = sum((size - line.intercept - line.slope * step) ** 2 for step, size in means)
    spread = sum((step - mean(steps)) ** 2 for step in steps)
    return line.slope, T_95[parts - 2] * math.sqrt(off / (parts - 2) / spread)


def growth(seconds: float) -> None:
    print("\nmemory: growth: bytes per step ± half the 95 % confidence interval; of the second half; total MB")
    rows = {}
    for job in (DDP_LOOP, "hvd loop", "Lockstep"):
        for rank, read in enumerate(run_workers(2, job, str(seconds))):
            pairs = read["pairs"]
            settled = pairs[len(pairs) // 4 :]
            whole, late = slope(settled, PARTS), slope(settled[len(settled) // 2 :], PARTS // 2)
            grown = (mean(size for _, size in settled[-10:]) - mean(size for _, size in settled[:10])) / MEGABYTE
            name, steps = f"{job}, worker {rank}", pairs[-1][0]
            rows[name] = {"bytes_a_step": whole, "second_half": late, "grown_mb": grown, "steps": steps, "pairs": pairs}
            print(
                f"  {name:24}{whole[0]:9.1f} ± {whole[1]:<9.1f}{late[0]:9.1f} ± {late[1]:<9.1f}{grown:7.2f} MB in "
                f"{steps - settled[0][0]:,} steps, to {settled[-1][1] / MEGABYTE:.0f} MB"
            )
    append_record({"name": "memory: growth", "unit": "bytes per step", "seconds": seconds, "contestants": rows})


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("peak").add_argument("rounds", type=rounds, nargs="?", default=ROUNDS)
    parts.add_parser("growth").add_argument("seconds", type=float, nargs="?", default=SECONDS)
    given = parser.parse_args()
    growth(given.seconds) if given.part == "growth" else peaks(given.rounds)
