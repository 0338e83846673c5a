"""How many files and how much time do workers save that are forked from one preloaded process?

    python benchmarks/one_import.py [files] [slow] [--rounds 3] [--workers 8] [--delay MILLISECONDS]

The workers run benchmarks/peers/first_step.py: torch alone, one step of digits-net, DDP. Needs a C compiler
(slow_files.py).
- files: number of files that a forked worker of `lockstep run` opens under Python's folders, compared with the same
  script started by `python`. Bar: at most 0.05 of them.
- slow: each open and stat under Python's folders is delayed, as on a busy shared file system. The figure is the seconds
  to the first step with 1 worker and with 8, by `lockstep run` and by torchrun. Bar: 8 workers take at most 1.1 times
  as long as one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import slow_files
from harness import FOLDER, Bar, append_record, rounds
from readings import Reading, compare_readings

STEP = str(FOLDER / "peers" / "step_with_pid.py")
PARTS = ("files", "slow")
FIRST_STEP = "to the first step"


def lockstep_run(workers: int, *flags: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", "run", "-np", str(workers), *flags, "--", sys.executable, STEP]


def pids(folder: Path) -> set[int]:
    return {int(path.stem) for path in folder.glob("*.pid")}


def counted(command: Sequence[str], delay_seconds: float = 0.0) -> tuple[list[slow_files.Process], float]:
    """Return the command's processes that ran the step, and the seconds until the step ended."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, **slow_files.environment(folder, delay_seconds)}
        began = time.time()
        subprocess.run([*command, name], cwd=name, env=environment, stdout=subprocess.DEVNULL, check=True)
        seconds = float((folder / "mark").read_text()) - began
        return [process for process in slow_files.processes(folder) if process.pid in pids(folder)], seconds


def files(workers: int) -> None:
    (cold,), _ = counted([sys.executable, STEP])
    forked, _ = counted(lockstep_run(workers))
    forked = [process for process in forked if process.is_forked]
    assert len(forked) == workers
    bar = Bar("at most", 0.05)
    print(f"\none_import: files of a forked worker (maximum of {workers}) and of a new interpreter")
    figures = {}
    for what in ("opens", "stats", "libraries"):
        most, all_of_them = max(getattr(process, what) for process in forked), getattr(cold, what)
        ratio = most / all_of_them
        figures[what] = {"forked": most, "fresh": all_of_them, "ratio": ratio}
        print(f"  {what:12}{most:>8,}{all_of_them:>10,}   {ratio:.4f}  {bar.verdict(ratio, (ratio, ratio))}")
    append_record({"name": f"one_import: files, {workers} workers", "unit": "calls", "figures": figures})


def slow(workers: int, delay_seconds: float, rounds: int) -> None:
    def reading(command: Sequence[str]) -> Reading:
        return lambda: {FIRST_STEP: counted(command, delay_seconds)[1]}

    def torchrun(size: int) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), STEP]

    contestants = {
        "lockstep run, 1 worker": reading(lockstep_run(1)),
        f"lockstep run, {workers} workers": reading(lockstep_run(workers)),
        "torchrun, 1 worker": reading(torchrun(1)),
        f"torchrun, {workers} workers": reading(torchrun(workers)),
    }
    name = f"one_import: files that take {1000 * delay_seconds:g} ms each"
    bars = {(FIRST_STEP, f"lockstep run, {workers} workers"): Bar("at most", 1.1)}
    compare_readings(name, contestants, bars, "seconds", rounds, warm_up=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them by default")
    parser.add_argument("--rounds", type=rounds, default=3)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--delay", type=float, default=1.0, metavar="MILLISECONDS", help="delay of each open and stat")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # so that processes can use cached bytecode
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    parts = given.parts or PARTS
    if "files" in parts:
        files(given.workers)
    if "slow" in parts:
        slow(given.workers, given.delay / 1000, given.rounds)


if __name__ == "__main__":
    main()
