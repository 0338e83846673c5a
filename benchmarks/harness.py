"""The common harness: contestants take turns in random order, and medians with quartiles come out.

In a round each contestant has one turn, so that whatever else the machine does meets all of them; ratios to the first
contestant are taken within rounds. The first round warms up and does not count. A turn is timed by the wall clock and
by the CPU time of this process and all that it started, which is steadier where others use the core too. Every turn is
appended to records/FILE.jsonl, with the machine and the versions; `lockstep report` draws them.
"""

from __future__ import annotations

import argparse
import ctypes
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
from lockstep.train.monitoring.environment import describe_publicly
from lockstep.world.launcher_environment import Place
from lockstep.world.world import World

FOLDER = Path(__file__).parent
Work = Callable[[], int]  # one turn; returns how many units of work it did
Turn = dict[str, float]  # units, and seconds by each clock
T = TypeVar("T")


class Unit(NamedTuple):
    """How a turn is shown: `factor` times the seconds that a unit of work took, or units of work a second."""

    label: str
    factor: float = 1.0
    per_second: bool = False

    def of(self, turn: Turn, clock: str) -> float:
        return turn["units"] / turn[clock] if self.per_second else self.factor * turn[clock] / turn["units"]


class Bar(NamedTuple):
    """What the median ratio of a contestant to the first has to be, by one of the clocks.

    Args:
        reaches: What its 95 % interval has to reach besides.
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
    """The one word of a benchmark's command; where it is wrong, or missing without a default, the command says so."""
    about = sys.modules["__main__"].__doc__
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(name, type=kind, nargs="?" if default else None, default=default[0] if default else None)
    given: T = getattr(parser.parse_args(), name)
    return given


def existing_folder(words: str) -> Path:
    """A folder that a command line names, for `argument` and argparse.

    Raises:
        argparse.ArgumentTypeError: There is none.
    """
    if not Path(words).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {words}")
    return Path(words)


def rounds(words: str) -> int:
    """A number of rounds, at least 2, for `argument` and argparse.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not words.isdecimal() or int(words) < 2:
        raise argparse.ArgumentTypeError(f"{words} is no number of rounds; give 2 or more")
    return int(words)


def pin() -> None:
    """Keep this process and its children to one thread, on the core that others use least just now."""
    busy = psutil.cpu_percent(interval=1.0, percpu=True)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0), key=lambda core: busy[core])})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def keep_memory() -> None:
    """Let glibc keep freed memory: handing it back and faulting it in again costs a step 0 to 30 %, as chance will."""
    mallopt, trim_threshold, mmap_max = ctypes.CDLL(None).mallopt, -1, -4  # as in malloc.h
    if not (mallopt(trim_threshold, -1) and mallopt(mmap_max, 0)):
        raise RuntimeError("glibc's mallopt refuses")


def interleave(contestants: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """What each contestant's turns gave, one a round, in random order; the rounds that warm up are left out."""
    turns: dict[str, list[T]] = {contestant: [] for contestant in contestants}
    for _ in range(warm_up + rounds):
        for contestant in random.sample(list(contestants), len(contestants)):
            turns[contestant].append(contestants[contestant]())
    return {contestant: taken[warm_up:] for contestant, taken in turns.items()}


def compare(name: str, contestants: Mapping[str, Work], bars: Mapping[str, Bar], unit: Unit, rounds: int) -> None:
    """Measure, print a table, append a record; `name` is "FILE" or "FILE: CASE"."""
    turns = interleave({contestant: partial(_take, work) for contestant, work in contestants.items()}, rounds)
    base = next(iter(turns.values()))
    rows = {contestant: _summarise(taken, base, unit) for contestant, taken in turns.items()}
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
    wall, own = time.perf_counter() - wall, time.process_time() - own  # before what takes time itself
    return {"units": units, "wall": round(wall, 6), "cpu": round(own + childrens_cpu_seconds() - others, 6)}


def childrens_cpu_seconds() -> float:
    """Of what this process started, to the hundredth, and of what has ended among them."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = usage.ru_utime + usage.ru_stime
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])  # user, system, and both of its ended children
    return seconds


def _summarise(turns: Sequence[Turn], base: Sequence[Turn], unit: Unit) -> dict[str, Any]:
    """The turns; the quartiles of the figures and of the ratios to `base`, and the ratios' interval, by both clocks."""
    row: dict[str, Any] = {"turns": turns}
    for clock in ("wall", "cpu"):
        figures = [unit.of(turn, clock) for turn in turns]
        ratios = [a / unit.of(b, clock) for a, b in zip(figures, base, strict=True)]
        row[clock] = quantiles(figures, method="inclusive")
        row[f"{clock}_ratio"] = quantiles(ratios, method="inclusive")
        row[f"{clock}_interval"] = median_interval(ratios)
    return row


def median_interval(values: Sequence[float]) -> list[float]:
    """Where the median lies with at least 95 % confidence, whatever the distribution; with few values, their range.

    Between the k-th value from below and from above, as the number of values under the median is binomial.
    """
    ordered, count = sorted(values), len(values)
    outside = 0.0  # the chance that the median lies below the k-th value
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
    environment = describe_publicly(World(Place(), torch.device("cpu")))
    writer.write({**record, "environment": {**environment, **({"peers": versions} if versions else {})}})
    writer.close()
