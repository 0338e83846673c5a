"""How do the costs of start-up, the control plane and memory grow from 2 to 128 workers on one machine?

    python benchmarks/cost_growth.py [start-up] [rounds] [memory] [--turns 7] [--workers 2 8 32 128]

All workers share this machine's cores, one thread each, so CPU time is the figure that applies to other machines.
- start-up: `lockstep run -np N -- true` and `torchrun --nproc-per-node N --no-python true` run in turns. Bar: at most
  0.3 of torchrun's wall time at each N.
- rounds: in workers of `lockstep run`, the engine's smallest calls next to those of torch.distributed; a turn is 200
  calls. An hvd call is one round of agreement on 1, 10 or 100 names; "new name" is a name that was never used before.
  Bar: hvd.allreduce of one element takes at most 2.5 times dist.all_reduce at each N.
- memory: USS (memory that only the process uses) and RSS of a worker after importing torch, after hvd.init and after
  100 all-reduces; what each worker adds while all exit, and how long that takes; and of the launcher's processes.
Each figure is fitted with a + b·N and a + b·log2(N); the form with the smaller leave-one-out error is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from growth import fit_growth
from harness import FOLDER, Bar, Unit, Work, append_record, compare
from workers import compare_in_workers, in_workers

from lockstep import hvd
from lockstep.world.world import World

MICROSECONDS = Unit("µs per round", 1e6)
CALLS = 200
MANY = (10, 100)
PARTS = ("start-up", "rounds", "memory")
WAIT_SECONDS = 120.0
MEBIBYTE = float(1 << 20)
Memory = dict[str, dict[str, float]]  # MiB by stage and kind


def start_up(size: int, turns: int) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def module(*arguments: str) -> Work:
            def turn() -> int:
                command = [sys.executable, "-m", *arguments]
                subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                return 1

            return turn

        contestants = {
            "torchrun": module("torch.distributed.run", "--nproc-per-node", str(size), "--no-python", "true"),
            "lockstep run": module("lockstep", "run", "-np", str(size), "--", "true"),
        }
        compare(
            f"cost_growth: start-up, {size} workers",
            contestants,
            {"lockstep run": Bar("at most", 0.3)},
            Unit("seconds"),
            turns,
        )


def rounds(world: World, turns: int) -> None:
    """Measure rounds; runs in each worker."""
    hvd.init()
    one = torch.ones(1)
    names = [f"layer{number}.weight" for number in range(max(MANY))]
    used = iter(range(1 << 30))

    def repeated(call: Callable[[], Any]) -> Work:
        def turn() -> int:
            for _ in range(CALLS):
                call()
            return CALLS

        return turn

    def together(count: int) -> None:
        for handle in [hvd.allreduce_async(one, name=name) for name in names[:count]]:
            hvd.synchronize(handle)

    contestants: dict[str, Work] = {
        "dist.all_reduce": repeated(lambda: dist.all_reduce(one)),
        "dist.monitored_barrier": repeated(dist.monitored_barrier),
        "hvd.barrier": repeated(hvd.barrier),
        "hvd.allreduce": repeated(lambda: hvd.allreduce(one, name="x")),
        "hvd.allreduce, new name": repeated(lambda: hvd.allreduce(one, name=f"x{next(used)}")),
    }
    for count in MANY:
        contestants[f"hvd, {count} names"] = repeated(lambda count=count: together(count))  # type: ignore[misc]
    bars = {"hvd.allreduce": Bar("at most", 2.5)}
    compare_in_workers(world, f"cost_growth: rounds, {world.size} workers", contestants, bars, MICROSECONDS, turns)
    hvd.shutdown()


def memory_of(process: psutil.Process) -> dict[str, float]:
    """Return a process's USS, PSS and RSS in MiB."""
    info = process.memory_full_info()
    return {kind: getattr(info, kind) / MEBIBYTE for kind in ("uss", "pss", "rss")}


def hold_memory(folder: Path) -> None:
    """Record the memory at each stage, then wait until all processes are measured; runs in each worker."""
    process = psutil.Process()
    held: Memory = {"torch": memory_of(process)}
    hvd.init()
    held["init"] = memory_of(process)
    tensor = torch.ones(1)
    for _ in range(100):
        hvd.allreduce(tensor, name="x")
    held["rounds"] = memory_of(process)
    path = folder / f"{hvd.rank()}.json"
    path.with_suffix(".part").write_text(json.dumps({"pid": process.pid, **held}))
    path.with_suffix(".part").rename(path)
    wait_for(lambda: (folder / "go").exists(), "the launcher's memory to be measured")
    hvd.shutdown()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out after {WAIT_SECONDS:g} s waiting for {what}")
        time.sleep(0.05)


def memory(size: int) -> dict[str, float]:
    """Measure memory in MiB: the median over workers, and the sum over the launcher's processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "lockstep", "run", "-np", str(size), "--"]
        job = subprocess.Popen([*command, sys.executable, __file__, "--hold-memory", name])
        wait_for(lambda: len(list(folder.glob("*.json"))) == size, f"{size} workers to measure their memory")
        workers = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        pids = {worker["pid"] for worker in workers}
        launcher = psutil.Process(job.pid)
        own = [
            memory_of(process) for process in (launcher, *launcher.children(recursive=True)) if process.pid not in pids
        ]
        free, start = [psutil.virtual_memory().available], time.monotonic()
        (folder / "go").touch()
        while job.poll() is None:
            free.append(psutil.virtual_memory().available)
            time.sleep(0.02)
        if job.wait():
            raise RuntimeError(f"the job of {size} workers failed")
    figures = {f"worker, {at}: {kind}": median(worker[at][kind] for worker in workers) for at, kind in MOMENTS}
    figures["worker, init and rounds: uss"] = median(
        worker["rounds"]["uss"] - worker["torch"]["uss"] for worker in workers
    )
    figures["worker, exit: more"] = (free[0] - min(free)) / MEBIBYTE / size
    figures["job, exit: seconds"] = time.monotonic() - start
    figures["launcher: uss"] = sum(process["uss"] for process in own)
    record = {"name": f"cost_growth: memory, {size} workers", "unit": "MiB", "figures": figures, "by worker": workers}
    append_record({**record, "launcher": own})
    return figures


MOMENTS = (("torch", "uss"), ("init", "uss"), ("rounds", "uss"), ("rounds", "pss"), ("rounds", "rss"))


def medians(name: str) -> dict[str, dict[str, float]]:
    """Return the medians of the last record with this name, by contestant and clock."""
    lines = (FOLDER / "records" / "cost_growth.jsonl").read_text().splitlines()
    record = [entry for entry in map(json.loads, lines) if entry.get("name") == name][-1]
    return {
        contestant: {clock: row[clock][1] for clock in ("wall", "cpu")}
        for contestant, row in record["contestants"].items()
    }


def show_growth(part: str, unit: str, figures: Mapping[int, Mapping[str, float]]) -> None:
    """Print a table of figures by number of workers, with their growth, and append it to the records."""
    print(f"\n{part}: {unit}, by the number of workers")
    print(f"  {'':34}" + "".join(f"{size:>11}" for size in figures) + "   grows by")
    fits = {}
    for what in next(iter(figures.values())):
        costs = {size: figures[size][what] for size in figures}
        shown = "".join(f"{cost:>11,.4g}" for cost in costs.values())
        if len(costs) >= 3 and min(costs.values()) > 0:
            fits[what] = fit_growth(costs)
        print(f"  {what:34}{shown}   {fits.get(what, '')}".rstrip())
    append_record(
        {
            "name": f"cost_growth: {part}",
            "unit": unit,
            "figures": figures,
            "fits": {what: fit._asdict() for what, fit in fits.items()},
        }
    )


def by_clock(name: str) -> dict[str, float]:
    return {
        f"{contestant}, {clock}": seconds
        for contestant, clocks in medians(name).items()
        for clock, seconds in clocks.items()
    }


def measure(parts: Sequence[str], sizes: Sequence[int], turns: int) -> None:
    if "start-up" in parts:
        for size in sizes:
            start_up(size, turns)
        show_growth("start-up", "seconds", {size: by_clock(f"cost_growth: start-up, {size} workers") for size in sizes})
    if "rounds" in parts:
        for size in sizes:
            command = [sys.executable, __file__, "--in-workers", str(size), "--turns", str(turns)]
            subprocess.run(command, check=True)
        show_growth(
            "rounds",
            "µs per round; cpu is rank 0's",
            {size: by_clock(f"cost_growth: rounds, {size} workers") for size in sizes},
        )
    if "memory" in parts:
        show_growth("memory", "MiB", {size: memory(size) for size in sizes})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them by default")
    parser.add_argument("--turns", type=int, default=7, help="turns per measurement")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32, 128], help="numbers of workers")
    parser.add_argument("--in-workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hold-memory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold_memory:
        hold_memory(options.hold_memory)
    elif options.in_workers:
        in_workers(options.in_workers, lambda world: rounds(world, options.turns))
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # so that processes can use cached bytecode
        unknown = [part for part in options.parts if part not in PARTS]
        if unknown:
            parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
        measure(options.parts or PARTS, options.workers, options.turns)


if __name__ == "__main__":
    main()
