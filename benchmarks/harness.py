"""The common harness: contestants take turns in random order, and medians with quartiles come out.

In a round each contestant has one turn, so that whatever else the machine does meets all of them; ratios to the first
contestant are taken within rounds. The first round warms up and does not count. A turn is timed by the wall clock and
by the CPU time of this process and its ended children, the steadier one where others use the core too. Every turn is
appended to records/FILE.jsonl, with the machine and the versions.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal, NamedTuple

import psutil
import torch

from lockstep.records import RecordWriter
from lockstep.train.environment import describe_environment
from lockstep.world import Place, World

FOLDER = Path(__file__).parent
Work = Callable[[], int]  # one turn; returns how many units of work it did
Clock = Literal["wall", "cpu"]


class Turn(NamedTuple):
    units: int
    wall: float
    cpu: float


class Unit(NamedTuple):
    """How a turn is shown: `factor` times the seconds that a unit of work took, or units of work a second."""

    label: str
    factor: float = 1.0
    per_second: bool = False

    def of(self, turn: Turn, clock: Clock) -> float:
        seconds = getattr(turn, clock)
        return turn.units / seconds if self.per_second else self.factor * seconds / turn.units


class Bar(NamedTuple):
    """What the median ratio of a contestant to the first has to be."""

    kind: Literal["at most", "at least"]
    ratio: float

    def verdict(self, ratio: float) -> str:
        met = ratio <= self.ratio if self.kind == "at most" else ratio >= self.ratio
        return f"{self.kind} {self.ratio:g}: {'met' if met else 'MISSED'}"


def pin() -> None:
    """Keep this process and its children to one thread, on the core that others use least just now."""
    busy = psutil.cpu_percent(interval=1.0, percpu=True)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0), key=lambda core: busy[core])})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def compare(
    name: str,
    contestants: Mapping[str, Work],
    bars: Mapping[str, Bar],
    unit: Unit,
    rounds: int,
    clock: Clock = "wall",
) -> None:
    """Measure, print a table, and append the record. `name` is the file's, then perhaps ": CASE"; bars go by `clock`."""
    turns: dict[str, list[Turn]] = {contestant: [] for contestant in contestants}
    for _ in range(1 + rounds):
        for contestant in random.sample(list(contestants), len(contestants)):
            turns[contestant].append(_take(contestants[contestant]))
    counted = {contestant: taken[1:] for contestant, taken in turns.items()}
    base = next(iter(counted.values()))
    rows: dict[str, dict[str, Any]] = {}
    print(f"{name}, in {unit.label}: median (quartiles) of {rounds} rounds; bars by {clock} time")
    print(f"  {'':30}{'wall':26}{'ratio':26}{'CPU ratio':26}")
    for contestant, taken in counted.items():
        row: dict[str, Any] = {"turns": taken}
        for kind in _CLOCKS:
            row[kind] = quantiles([unit.of(turn, kind) for turn in taken])
            pairs = zip(taken, base, strict=True)
            row[f"{kind}_ratio"] = quantiles([unit.of(turn, kind) / unit.of(other, kind) for turn, other in pairs])
        if contestant in bars:
            row["verdict"] = bars[contestant].verdict(row[f"{clock}_ratio"][1])
        cells = "".join(f"{_show(row[key]):26}" for key in ("wall", "wall_ratio", "cpu_ratio"))
        print(f"  {contestant:30}{cells}{row.get('verdict', '')}".rstrip(), flush=True)
        rows[contestant] = row
    _append({"name": name, "unit": unit.label, "bars_by": clock, "contestants": rows})


_CLOCKS: tuple[Clock, ...] = ("wall", "cpu")


def _take(work: Work) -> Turn:
    wall, cpu = time.perf_counter(), _cpu_seconds()
    units = work()
    return Turn(units, time.perf_counter() - wall, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _show(spread: Sequence[float]) -> str:
    low, median, high = (f"{figure:.4g}" for figure in spread)
    return f"{median} ({low} to {high})"


def _append(record: Mapping[str, Any]) -> None:
    environment = describe_environment(World(Place(), torch.device("cpu")))
    cpu = next(line.partition(": ")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
