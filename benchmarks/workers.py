"""Workers for benchmarks: rank 0 measures, and the others do the same work at the same time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from harness import Bar, Unit, Work, compare

from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.job_plan import plan_local
from lockstep.world.devices import usable_cores
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World, connect


def in_workers(size: int, main: Callable[[World], None]) -> None:
    """Start `size` workers with one thread each that call `main`, or call it if this process is such a worker."""
    rank_info = RankInfo.from_environment()
    if rank_info.launcher == "none":
        from lockstep.launch.controller.job_series import JobSeries

        os.environ["OMP_NUM_THREADS"] = "1"
        plan = plan_local(size, [sys.executable, *sys.argv], usable_cores(), os.environ)
        with JobSeries() as jobs:
            sys.exit(jobs.run(replace(plan, direct_stdout=True), OutputPlan(size, prefixed=False)))
    torch.set_num_threads(1)
    with connect(rank_info, "cpu") as world:
        main(world)


def compare_in_workers(
    world: World, name: str, contestants: Mapping[str, Work], bars: Mapping[str, Bar], unit: Unit, rounds: int
) -> None:
    """Run `harness.compare` with every worker running each turn."""
    names = list(contestants)
    if world.is_main:

        def led(index: int) -> Work:
            def turn() -> int:
                dist.broadcast(torch.tensor([index]), 0)
                return contestants[names[index]]()

            return turn

        compare(name, {names[index]: led(index) for index in range(len(names))}, bars, unit, rounds)
        dist.broadcast(torch.tensor([-1]), 0)
        return
    index = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.broadcast(index, 0)
        if index.item() < 0:
            return
        contestants[names[int(index)]]()
