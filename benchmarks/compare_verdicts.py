"""How often is the verdict of `lockstep compare` wrong, and how often does it find a step that is 5 % slower?

    python benchmarks/compare_verdicts.py [SECONDS]

A real program under `lockstep run --observe-dir` alternates between parts of 6.5 s as it is (A) and with 5 % more work
in its forward pass (B), for SECONDS (620). A busy loop runs beside half of the parts, at random. The records of a part
are those of one run. Compared are 40 pairs of equal single runs, 40 pairs of five, ten and twenty equal runs each in
turn, and 20 pairs of one, five, ten and twenty runs each in turn, of A and B. The same is done with runs drawn from
stretches of A's records of up to 1.5 times the shortest step, and in B's forward pass 5 % of a step more. Bars: at most
one wrong verdict of equal runs in each 40, and 18 of 20 slower ones found by some number of runs.
"""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.diagnosis.phases import parts_of
from lockstep.files.jsonl import read_records
from lockstep.report.comparison import WHOLE, StepTimes, compare
from lockstep.report.sides import times_of
from lockstep.report.worker_records import phase_medians

SECONDS, PART_SECONDS, SLOWER, BATCH = 620.0, 6.5, 0.05, 64
MIN_RECORDS, LENGTH = 3, 8  # of a part, and of a run that is drawn
NOISE = 1.5  # the longest step of these runs, in shortest ones
Parts = list[list[StepTimes]]  # the records of each part, in the order of time


class Program:
    """A network with three layers, whose step takes a few milliseconds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # as the loss approaches 0, subnormal gradients would slow each step
        self.data = TensorDataset(torch.randn(1024, 256), torch.randint(10, (1024,)))
        self.model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.first, self.second = torch.randn(2, 256), torch.randn(256, 256)
        self.steps, self.more_seconds = 0, 0.0

    def train_epoch(self, products: int = 0) -> None:
        for inputs, labels in DataLoader(self.data, BATCH):
            self.optimizer.zero_grad()
            outputs = self.model(inputs)
            start = time.thread_time()
            for _ in range(products):
                torch.mm(self.first, self.second)
            self.more_seconds += time.thread_time() - start
            nn.functional.cross_entropy(outputs, labels).backward()
            self.optimizer.step()
            self.steps += 1

    def products(self) -> int:
        """Return the number of products that make a step's CPU time larger by `SLOWER`."""
        self.train_epoch()
        self.more_seconds, start, number = 0.0, time.thread_time(), 20
        for _ in range(40):
            self.train_epoch(number)
        rest = time.thread_time() - start - self.more_seconds
        return max(1, round(number * SLOWER * rest / self.more_seconds))


def train(seconds: float) -> None:
    """Alternate between A and B, and print the steps of each part."""
    program, draw, end = Program(), random.Random(1), time.monotonic() + seconds
    products, is_slow = program.products(), False
    while time.monotonic() < end:
        loop = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if draw.random() < 0.5 else None
        first, part_end, cpu = program.steps, time.monotonic() + PART_SECONDS, time.process_time()
        while time.monotonic() < part_end:
            program.train_epoch(is_slow * products)
        if loop:
            loop.kill()
            loop.wait()
        cpu = (time.process_time() - cpu) / (program.steps - first)
        print(json.dumps({"slow": is_slow, "first": first, "last": program.steps, "cpu_seconds": cpu}), flush=True)
        is_slow = not is_slow


def measure(seconds: float, folder: Path) -> tuple[Parts, Parts]:
    """Return the parts of A and B."""
    command = [sys.executable, "-m", "lockstep", "run", "-np", "1", "--observe-dir", str(folder), "--"]
    done = subprocess.run(
        [*command, sys.executable, __file__, str(seconds), "train"], stdout=subprocess.PIPE, text=True, check=True
    )
    parts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found: tuple[Parts, Parts] = ([], [])
    before, records = 0, []
    for record in read_records(folder / "metrics.jsonl"):
        if record["kind"] == "step":
            records.append((before, record))
            before = record["step"]
    for part in parts:
        inside = [each for start, each in records if part["first"] <= start and each["step"] <= part["last"]]
        if len(inside) >= MIN_RECORDS:
            phases = [parts_of(phase_medians(record)) for record in inside]
            times = [times_of(record, None, each) for record, each in zip(inside, phases, strict=True)]
            found[part["slow"]].append([only for (only,) in times])
    cpu = [
        sum(part["cpu_seconds"] for part in parts if part["slow"] == slow) / sum(part["slow"] == slow for part in parts)
        for slow in (False, True)
    ]
    print(f"{len(found[0])} parts of A, {len(found[1])} of B, whose step takes {cpu[1] / cpu[0]:.3f} of A's CPU time")
    return found


def count(title: str, pairs: Iterable[tuple[Parts, Parts]]) -> None:
    verdicts = Counter(compare(*pair).verdict for pair in pairs)
    print(f"{title:40}", ", ".join(f"{verdict} {number}" for verdict, number in sorted(verdicts.items())))


def windows(parts: Sequence[list[StepTimes]], runs: int, number: int) -> list[Parts]:
    """Return so many windows of consecutive parts, evenly spread."""
    last = len(parts) - runs
    return [
        list(parts[start : start + runs]) for start in (index * last // max(1, number - 1) for index in range(number))
    ]


def drawn(parts: Parts, runs: int, number: int, slower: float, draw: random.Random) -> Iterator[tuple[Parts, Parts]]:
    """Yield pairs of so many runs in turn, from the quieter records of A; those of the second are slower."""
    records = [times for part in parts for times in part]
    shortest = min(times.seconds[WHOLE] for times in records)
    quiet = [times for times in records if times.seconds[WHOLE] <= NOISE * shortest]
    for _ in range(number):
        sides: tuple[Parts, Parts] = ([], [])
        for turn in range(2 * runs):
            start = draw.randrange(len(quiet) - LENGTH)
            more = turn % 2 * slower
            sides[turn % 2].append([_slowed(times, more, turn) for times in quiet[start : start + LENGTH]])
        yield sides


def _slowed(times: StepTimes, share: float, turn: int) -> StepTimes:
    more = share * times.seconds[WHOLE]
    slowed = {name: times.seconds[name] + more for name in ("forward", WHOLE)}
    return times._replace(seconds={**times.seconds, **slowed}, unix_time=float(turn))


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    if sys.argv[2:] == ["train"]:
        train(seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        a, b = measure(seconds, Path(folder, "records"))
        if len(sys.argv) > 2:
            Path(sys.argv[2]).write_bytes(pickle.dumps((a, b)))
    draw = random.Random(0)
    singles = [draw.sample(parts, 2) for parts in (a, b) for _ in range(20)]
    count("equal, a run each", (([first], [second]) for first, second in singles))
    for runs in (5, 10, 20):
        equal = [window for parts in (a, b) for window in windows(parts, 2 * runs, 20)]
        count(f"equal, {runs} each in turn", ((window[::2], window[1::2]) for window in equal))
    for runs in (1, 5, 10, 20):
        pairs = zip(windows(a[: len(b)], runs, 20), windows(b[: len(a)], runs, 20), strict=True)
        count(f"5 % slower, {runs} each in turn", pairs)
    for runs in (1, 5, 10, 20):
        count(f"drawn: equal, {runs} each in turn", drawn(a, runs, 400, 0.0, draw))
        count(f"drawn: 5 % slower, {runs} each in turn", drawn(a, runs, 200, SLOWER, draw))


if __name__ == "__main__":
    main()
