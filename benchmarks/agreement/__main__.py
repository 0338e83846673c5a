"""How long does a round of agreement take on up to 4,096 workers, beside Horovod's published design?

    python benchmarks/agreement [--largest 4096] [--repeats 15]

A simulation in virtual time of the real engine: each worker's `Channel` and `Control` run as they are
(simulated_workers.py), over messages in memory whose costs are measured first, on this machine's loopback over the
engine's own sockets (message_costs.py). What a worker computes costs what it took here, with that many workers. One
worker a host, which never waits for a core; between hosts there is the stated latency and bandwidth. Beside it are the
messages of Horovod's design at the same costs (horovod_design.py), without and with its cycle of 1 ms.

First the simulation is held against measurement: rounds of 2 to 16 real workers on this machine's cores, which they
share in the simulation, too. Bar: predicted over measured time a round between 0.5 and 2 at each of these counts.

A case that would need more memory here than --gigabytes is left out.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import horovod_design
import torch
from forked_workers import Clocks, agreement_rounds, barriers
from message_costs import MessageCosts, calibrate
from simulated_workers import SimulatedJob, on_one_core
from virtual_time import Network

from lockstep.hvd.engine.agreement import ENTRY_BYTES, HEADER_BYTES
from lockstep.hvd.engine.control import CAPACITY_BYTES, GATHERED_WORKERS
from lockstep.hvd.engine.request import Request

sys.path.append(str(Path(__file__).parents[1]))
from harness import append_record

NETWORKS = {
    "20 µs, 25 Gbit/s": Network(latency=20e-6, per_byte=8 / 25e9),
    "100 µs, 10 Gbit/s": Network(latency=100e-6, per_byte=8 / 10e9),
}
NAMES = (1, 100)
ORDERS = 8  # in which the workers submit, where they differ
DIFFERING_NAMES = 10
MEASURED = (2, 4, 8, 16)
ROUNDS = (3, 6)  # to measure what the engine computes, and to count
FEW_ROUNDS, MANY_WORKERS = (1, 1), 128  # above which even one round has enough workers to take the median of
BAR = (0.5, 2.0)


def simulated_round(size: int, costs: MessageCosts, network: Network, names: int, differing: bool = False) -> Clocks:
    """Seconds of a round, and processor seconds of all workers, where each begins the next when one is over for it."""

    def requests(rank: int) -> Sequence[Callable[[], Request]]:
        return barriers(names, rank % ORDERS if differing else 0)

    with on_one_core(), closing(SimulatedJob(size, costs, network)) as job:
        counts = FEW_ROUNDS if size > MANY_WORKERS else ROUNDS
        job.rounds(counts[0], requests, hurry=names > 1)
        job.stopwatch.settle()
        busy = job.simulation.busy_seconds
        ends = job.rounds(1 + counts[1], requests, hurry=names > 1)
    cpu = (job.simulation.busy_seconds - busy) / (1 + counts[1])
    return {"wall": (ends[-1] - ends[0]) / counts[1], "cpu": cpu}


def check(costs: MessageCosts, repeats: int) -> None:
    """Hold the simulation against measured rounds on this machine's cores."""
    cores = len(os.sched_getaffinity(0))
    print(f"\nmeasured on {cores} cores, and simulated on as many: ms a round of agreement, median of {repeats} turns;")
    print("processor time is that of all workers together")
    headings = ("measured", "simulated", "ratio", "CPU measured", "simulated", "ratio")
    print(f"  {'workers':>8}{'names':>7}" + "".join(f"{heading:>14}" for heading in headings))
    for names in NAMES:
        for size in MEASURED:
            turns = agreement_rounds(size, names, rounds=800 // size, turns=repeats)
            measured = {clock: median(turn[clock] for turn in turns) for clock in ("wall", "cpu")}
            simulated = simulated_round(size, costs, Network(cores=cores), names)
            ratios = {clock: simulated[clock] / measured[clock] for clock in measured}
            bar = f"{BAR[0]:g} to {BAR[1]:g} by wall: {'met' if BAR[0] <= ratios['wall'] <= BAR[1] else 'MISSED'}"
            cells = [
                f"{figure:14.3f}"
                for clock in ("wall", "cpu")
                for figure in (1e3 * measured[clock], 1e3 * simulated[clock], ratios[clock])
            ]
            print(f"  {size:8,}{names:7}{''.join(cells)}  {bar}", flush=True)
            append_record(
                {
                    "name": "agreement: checked",
                    "unit": "seconds a round",
                    "workers": size,
                    "names": names,
                    "cores": cores,
                    "turns": turns,
                    "measured": measured,
                    "simulated": simulated,
                    "ratios": ratios,
                    "bar": bar,
                }
            )


def row_bytes(size: int, names: int, differing: bool) -> int:
    """Of memory that a worker writes to for each other worker."""
    if size <= GATHERED_WORKERS:
        return CAPACITY_BYTES
    return HEADER_BYTES + ENTRY_BYTES * names if differing else 0


def predict(costs: MessageCosts, label: str, network: Network, sizes: Sequence[int], memory_bytes: float) -> None:
    """The table of one network."""
    columns = (
        [f"{names} equal" for names in NAMES]
        + [f"{DIFFERING_NAMES} in other orders"]
        + [f"Horovod {kind}" for kind in ("cached", "and cycle", "first", "and cycle", "Gloo cached")]
    )
    print(f"\none worker a host, {label} between them: ms a round; names agreed on in it, and {NAMES[-1]} for Horovod")
    print("  workers" + "".join(f"{column:>20}" for column in columns))
    for size in sizes:
        row: dict[str, float | None] = {}
        cases = [(names, False) for names in NAMES] + [(DIFFERING_NAMES, True)]
        for column, (names, differing) in zip(columns, cases, strict=False):
            needed = size**2 * row_bytes(size, names, differing)
            fits = needed * 1.6 <= memory_bytes
            row[column] = simulated_round(size, costs, network, names, differing)["wall"] if fits else None
        names = NAMES[-1]
        first = horovod_design.exchange_seconds(horovod_design.uncached, size, names, costs, network)
        hit = horovod_design.exchange_seconds(horovod_design.cached, size, names, costs, network)
        horovod = [
            hit,
            horovod_design.with_cycle(hit),
            first,
            horovod_design.with_cycle(first),
            horovod_design.ring_seconds(size, names, costs, network),
        ]
        cells = [*row.values(), *horovod]
        shown = "".join(f"{'-' if cell is None else f'{1e3 * cell:.3f}':>20}" for cell in cells)
        print(f"  {size:7,}{shown}", flush=True)
        append_record(
            {
                "name": "agreement: predicted",
                "unit": "seconds a round",
                "network": {"latency": network.latency, "per_byte": network.per_byte},
                "workers": size,
                "lockstep": row,
                "horovod": dict(
                    zip(("cached", "cached and cycle", "first", "first and cycle", "gloo cached"), horovod, strict=True)
                ),
                "costs": costs.record(),
            }
        )


def show(costs: MessageCosts) -> None:
    print("what a message costs here, µs and ns a byte:")
    for part, cost in costs.record().items():
        figures: Any = cost if isinstance(cost, dict) else {"fixed": cost}
        print(f"  {part:14}{1e6 * figures['fixed']:8.2f}{1e9 * figures.get('per_byte', 0.0):8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--largest", type=int, default=4096, help="number of workers, a power of two")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each measurement")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="of memory for the simulated workers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    costs = calibrate(options.repeats)
    show(costs)
    check(costs, options.repeats)
    sizes = [2**power for power in range(1, int(math.log2(options.largest)) + 1)]
    for label, network in NETWORKS.items():
        predict(costs, label, network, sizes, options.gigabytes * 2**30)
    print(f"\nall of it took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
