"""How much does it cost per step to time its phases and to publish them?

    python benchmarks/progress_reports.py

One process, one thread, one core, real steps of the training loop: mnist-net on batches of 128 and of 16, without and
with the clock, a board in shared memory and the thread that samples the stack twice a second. Bar: at most 1.005, by
CPU time, of a step of 10 ms. The first contestant competes twice: the second one's deviation from 1 is the measurement
noise.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import timeit
from pathlib import Path

import torch
from harness import Bar, Unit, compare, keep_memory, pin
from work import epoch_of, noise

from lockstep.diagnosis import FOLDER, publisher
from lockstep.diagnosis.phases import Phase
from lockstep.train.fit import configure
from lockstep.train.job import Job
from lockstep.train.network import build_model
from lockstep.train.setup import build_job
from lockstep.train.worker_times import WorkerTimes
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.step_clock import StepClock
from lockstep.world.world import World

CASES = ((128, 20, 15), (16, 100, 15))  # samples per step, steps per turn, rounds


class NoClock(StepClock):
    """Neither times nor publishes."""

    def begin(self, phase: Phase) -> None:
        pass

    def end(self) -> None:
        pass


def main() -> None:
    pin()
    keep_memory()
    with tempfile.TemporaryDirectory() as folder:
        jobs = {batch: _job(folder, batch) for batch, _, _ in CASES}
        silent = {batch: _with_clock(job, NoClock(job.world.device)) for batch, job in jobs.items()}
        os.environ |= {FOLDER: folder, "RANK": "0"}
        publisher.start()
        board = publisher.own_board()
        assert board
        print(f"a report: {timeit.timeit(lambda: board.report('forward'), number=1_000_000):.2f} µs")
        for batch, steps, rounds in CASES:
            contestants = {
                "silent": epoch_of(silent[batch], steps),
                "silent, again": epoch_of(silent[batch], steps),
                "publishing": epoch_of(_with_clock(jobs[batch], StepClock(jobs[batch].world.device, board)), steps),
            }
            bars = {"publishing": Bar("at most", 1.005, "cpu")}
            compare(f"progress_reports: {batch} samples", contestants, bars, Unit("ms per step", 1000), rounds)


def _with_clock(job: Job, clock: StepClock) -> Job:
    return dataclasses.replace(job, clock=clock, worker_times=WorkerTimes(job.world, clock, ()))


def _job(folder: str, batch: int) -> Job:
    where = Path(folder, str(batch))
    settings = configure(
        batch_size=batch, epochs=10_000, lr=0.01, schedule="constant", track=(), run_dir=where, quiet=True
    )
    config = dataclasses.replace(settings, model=dataclasses.replace(settings.model, arch="mnist-net"))
    data = noise(1, 28, batch * 100)
    return build_job(config, World(RankInfo(), torch.device("cpu")), data, build_model(config, data))


if __name__ == "__main__":
    main()
