"""How much memory does a worker take, at most and over time, against a DDP loop by hand?

    python benchmarks/memory.py peak [ROUNDS]
    python benchmarks/memory.py growth [SECONDS]

peak: mnist-net, cifar-small and resnet18 at batches of 128 from memory, on one worker and on two; a turn is a job of
some steps, whose figures are a worker's largest: what is its own at the end (USS), with its share of what others map
too (PSS), and the most it ever held (VmHWM). Lockstep's loop also evaluates and saves a checkpoint.
Last, the processes beside two idle workers, with their USS summed: `lockstep run` against torchrun.
Bar: at most 1.1 of the loop's most, and at most 1.25 of torchrun's. About 5 minutes.

growth: two workers train digits-net on batches of 16 for 75 seconds: Lockstep's trainer, whose epochs of 50 steps end
with an evaluation, records, TensorBoard and a checkpoint; a loop with hvd.DistributedOptimizer that sums eight named
tensors a step besides; and a DDP loop by hand. USS is read four times a second. What counts is the slope of a straight
line through the means of twelve equal parts, with its 95 % confidence interval, once the first quarter is left out; and
the slope of the second half of these alone, which is less where growth levels off. About 5 minutes.
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

BY_HAND = "DDP by hand"
STEPS = {"mnist-net": 20, "cifar-small": 10, "resnet18": 2}
ROUNDS, SECONDS = 2, 75.0
PARTS = 12
T_95 = {4: 2.776, 10: 2.228}  # Student's t for 95 %, by degrees of freedom
MEGABYTE = 1e6


def run_workers(workers: int, job: str, *words: str) -> list[dict[str, Any]]:
    """Run a job in so many workers; what each has left in the folder that it was told."""
    with TemporaryDirectory() as folder:
        script = ("peers/memory_loop.py",) if job == BY_HAND else ("memory_jobs.py", job)
        command = [sys.executable, "-m", "lockstep", "run", "-np", str(workers), "--"]
        command += [sys.executable, str(FOLDER / script[0]), *script[1:], folder, *words]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(workers)]


def peak_of(job: str, net: str, workers: int) -> Reading:
    def turn() -> dict[str, float]:
        read = run_workers(workers, job, net, str(STEPS[net]))
        return {name: max(each[name] for each in read) / MEGABYTE for name in ("uss", "pss", "peak")}

    return turn


def launcher_of(*words: str) -> Reading:
    """What a launcher's processes hold while its two workers, which sleep, are up."""

    def turn() -> dict[str, float]:
        with TemporaryDirectory() as folder:
            script = Path(folder, "idle.py")
            script.write_text(
                f"import os, time\nopen(f'{folder}/{{os.environ[\"RANK\"]}}', 'w').write(str(os.getpid()))\n"
                f"while not os.path.exists('{folder}/end'): time.sleep(0.1)\n"
            )
            launcher = psutil.Popen(
                [sys.executable, "-m", *words, str(script)],
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while not all(Path(folder, rank).exists() for rank in "01"):
                if launcher.poll() is not None:
                    raise RuntimeError(f"{' '.join(words)} ended before its workers were up")
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
            contestants = {job: peak_of(job, net, workers) for job in (BY_HAND, "Lockstep")}
            name = f"memory: {net}, {workers} worker{'s' * (workers > 1)}"
            compare_readings(
                name, contestants, {("peak", "Lockstep"): Bar("at most", 1.1)}, "MB a worker", rounds, warm_up=0
            )
    launchers = {
        "torchrun": launcher_of("torch.distributed.run", "--nproc-per-node", "2"),
        "lockstep run": launcher_of("lockstep", "run", "-np", "2", "--", sys.executable),
    }
    bars = {("uss", "lockstep run"): Bar("at most", 1.25)}
    compare_readings("memory: launcher", launchers, bars, "MB", rounds, warm_up=0)


def slope(pairs: Sequence[Sequence[int]], parts: int) -> tuple[float, float]:
    """Bytes a step, and half of its 95 % confidence interval, by the means of equal parts."""
    edges = [len(pairs) * part // parts for part in range(parts + 1)]
    means = [[mean(column) for column in zip(*pairs[a:b], strict=True)] for a, b in pairwise(edges)]
    steps, sizes = zip(*means, strict=True)
    line = linear_regression(steps, sizes)
    off = sum((size - line.intercept - line.slope * step) ** 2 for step, size in means)
    spread = sum((step - mean(steps)) ** 2 for step in steps)
    return line.slope, T_95[parts - 2] * math.sqrt(off / (parts - 2) / spread)


def growth(seconds: float) -> None:
    print("\nmemory: growth: bytes a step, with the 95 % confidence interval's half; the second half's; MB in all")
    rows = {}
    for job in (BY_HAND, "hvd loop", "Lockstep"):
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
    append_record({"name": "memory: growth", "unit": "bytes a step", "seconds": seconds, "contestants": rows})


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("peak").add_argument("rounds", type=rounds, nargs="?", default=ROUNDS)
    parts.add_parser("growth").add_argument("seconds", type=float, nargs="?", default=SECONDS)
    words = parser.parse_args()
    growth(words.seconds) if words.part == "growth" else peaks(words.rounds)
