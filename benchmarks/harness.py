"""The common harness: run contestants in turns, in random order, and compute medians with quartiles.

In a round, each contestant has one turn, so that other load on the machine affects all of them; ratios to the first
contestant are computed within rounds. The first round is a warm-up. A turn is measured in wall time and in CPU time of
this process and all its descendants, which is steadier on shared cores. Every turn is appended to records/FILE.jsonl,
with the machine and the versions.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import comb
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal, NamedTuple, TypeVar

import psutil
import torch
from environments import versions

from lockstep.files.jsonl import RecordWriter
from lockstep.world.host_memory import keep_freed_memory
from lockstep.world.machine import describe_commits, describe_machine

FOLDER = Path(__file__).parent
Work = Callable[[], int]  # runs one turn; returns its units of work
Turn = dict[str, float]  # units, and seconds by each clock
T = TypeVar("T")


class Unit(NamedTuple):
    """The figure of a turn: `factor` times the seconds per unit of work, or units of work per second."""

    label: str
    factor: float = 1.0
    per_second: bool = False

    def of(self, turn: Turn, clock: str) -> float:
        return turn["units"] / turn[clock] if self.per_second else self.factor * turn[clock] / turn["units"]


class Bar(NamedTuple):
    """The required median ratio of a contestant to the first one, by one of the clocks.

    Args:
        reaches: A ratio that the 95 % interval must also reach.
    """

    kind: Literal["at most", "at least"]
    ratio: float
    clock: Literal["wall", "cpu"] = "wall"
    reaches: float | None = None

    def verdict(self, median: float, interval: Sequence[float], by: str = "") -> str:
        reach = self.ratio if self.reaches is None else self.reaches
        if self.kind == "at most":
            met = median <= self.ratio and interval[0] <= reach
        else:
            met = median >= self.ratio and interval[1] >= reach
        besides = "" if self.reaches is None else f", its interval reaching {self.reaches:.2f}"
        return f"{self.kind} {self.ratio:.4g}{by}{besides}: {'met' if met else 'MISSED'}"


def argument(name: str, kind: Callable[[str], T], *default: T) -> T:
    """Parse a benchmark's only argument; exit with an error if it is invalid, or missing without a default."""
    about = sys.modules["__main__"].__doc__
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(name, type=kind, nargs="?" if default else None, default=default[0] if default else None)
    given: T = getattr(parser.parse_args(), name)
    return given


def existing_folder(path: str) -> Path:
    """Convert an argument to the path of an existing folder, for `argument` and argparse.

    Raises:
        argparse.ArgumentTypeError: The folder does not exist.
    """
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"{path}: no such folder")
    return Path(path)


def positive(count: str) -> int:
    """Convert an argument to an integer of at least 1, for `argument` and argparse."""
    return _integer(count, 1)


def rounds(count: str) -> int:
    """Convert an argument to a number of rounds, for `argument` and argparse."""
    return _integer(count, 2)


def _integer(count: str, least: int) -> int:
    if not count.isdecimal() or int(count) < least:
        raise argparse.ArgumentTypeError(f"{count}: must be an integer of at least {least}")
    return int(count)


def pin() -> None:
    """Limit this process and its children to one thread, on the core that is currently least busy."""
    busy = psutil.cpu_percent(interval=1.0, percpu=True)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0), key=lambda core: busy[core])})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def keep_memory() -> None:
    """Let this process keep freed memory to its end: returning it costs a random 0 to 30 % of a step."""
    keep_freed_memory(torch.device("cpu"))


def interleave(contestants: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Run one turn per contestant and round, in random order; return the results without those of warm-up rounds."""
    turns: dict[str, list[T]] = {contestant: [] for contestant in contestants}
    for _ in range(warm_up + rounds):
        for contestant in random.sample(list(contestants), len(contestants)):
            turns[contestant].append(contestants[contestant]())
    return {contestant: taken[warm_up:] for contestant, taken in turns.items()}


def compare(name: str, contestants: Mapping[str, Work], bars: Mapping[str, Bar], unit: Unit, rounds: int) -> None:
    """Measure, print a table and append a record; `name` is "FILE" or "FILE: CASE"."""
    conclude(name, measure(contestants, rounds), bars, unit)


def measure(contestants: Mapping[str, Work], rounds: int) -> dict[str, list[Turn]]:
    """Return the turns of each contestant."""
    return interleave({contestant: partial(_take, work) for contestant, work in contestants.items()}, rounds)


def conclude(name: str, turns: Mapping[str, Sequence[Turn]], bars: Mapping[str, Bar], unit: Unit) -> None:
    """Print a table of turns, and append a record; `name` is "FILE" or "FILE: CASE"."""
    rounds = len(next(iter(turns.values())))
    base = next(iter(turns.values()))
    rows = {contestant: _summarize(taken, base, unit) for contestant, taken in turns.items()}
    print(f"\n{name}: {unit.label}, median (quartiles) of {rounds} rounds")
    width = max(22, *map(len, rows)) + 2
    print(f"  {'':{width}}{'wall':34}{'ratio':32}ratio by CPU time")
    for contestant, row in rows.items():
        if bar := bars.get(contestant):
            median, interval = row[f"{bar.clock}_ratio"][1], row[f"{bar.clock}_interval"]
            row["bar"] = bar.verdict(median, interval, f" by {bar.clock}")
        cells = f"{_show(row['wall']):34}{_show(row['wall_ratio']):32}{_show(row['cpu_ratio']):32}"
        print(f"  {contestant:{width}}{cells}{row.get('bar', '')}".rstrip())
    append_record({"kind": "comparison", "name": name, "unit": unit.label, "contestants": rows})


def _take(work: Work) -> Turn:
    others, own, wall = childrens_cpu_seconds(), time.process_time(), time.perf_counter()
    units = work()
    wall, own = time.perf_counter() - wall, time.process_time() - own  # before the calls below, which take time
    return {"units": units, "wall": round(wall, 6), "cpu": round(own + childrens_cpu_seconds() - others, 6)}


def childrens_cpu_seconds() -> float:
    """Return the CPU time of all descendants, including exited ones, to 0.01 s."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = usage.ru_utime + usage.ru_stime
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])  # user and system, of the process and its exited children
    return seconds


def _summarize(turns: Sequence[Turn], base: Sequence[Turn], unit: Unit) -> dict[str, Any]:
    """Return the turns and, by each clock, quartiles of figures and of ratios to `base`, and the ratios' interval."""
    row: dict[str, Any] = {"turns": turns}
    for clock in ("wall", "cpu"):
        figures = [unit.of(turn, clock) for turn in turns]
        ratios = [a / unit.of(b, clock) for a, b in zip(figures, base, strict=True)]
        row[clock] = quantiles(figures, method="inclusive")
        row[f"{clock}_ratio"] = quantiles(ratios, method="inclusive")
        row[f"{clock}_interval"] = median_interval(ratios)
    return row


def median_interval(values: Sequence[float]) -> list[float]:
    """Return a distribution-free interval of the median with at least 95 % confidence; the range for few values.

    It is between the k-th smallest and the k-th largest value, as the number of values below the median is binomial.
    """
    ordered, count = sorted(values), len(values)
    outside = 0.0  # probability that the median is below the k-th value
    for k in range(count // 2):
        outside += comb(count, k) / 2**count
        if 2 * outside > 0.05:
            return [ordered[max(k - 1, 0)], ordered[-max(k, 1)]]
    return [ordered[0], ordered[-1]]


def _show(spread: Sequence[float]) -> str:
    low, median, high = (f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}" for figure in spread)
    return f"{median} ({low} to {high})"


def append_record(record: Mapping[str, Any]) -> None:
    path = FOLDER / "records" / f"{record['name'].partition(':')[0]}.jsonl"
    path.parent.mkdir(exist_ok=True)
    writer = RecordWriter(path)
    environment = {**describe_machine(1), **describe_commits(), "load_average": os.getloadavg()}
    writer.write({**record, "environment": {**environment, **({"peers": versions} if versions else {})}})
    writer.close()
