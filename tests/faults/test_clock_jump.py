"""The wall clock is set while a job runs: neither results nor durations nor the verdict on a failure depend on it.

The clock itself is this machine's and stays: only the result of `time.time()` jumps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import LOCKSTEP, own_environment, run
from runs import NETS, final_weights, losses, small_digits
from torch import nn
from worker_group import run_in_workers

from lockstep.files.jsonl import read_records
from lockstep.seeding import seed_all
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World

SETTINGS = {"epochs": 2, "global_batch_size": 60, "log_every": 1, "lr": 0.05, "lr_scaling": "none", "track": ()}
HOUR = 3600.0
# Each look at the clock of this process shows 1,000 s less than the one before.
BACKWARDS = """
import itertools, time
real, looks = time.time, itertools.count()
time.time = lambda: real() - 1000 * next(looks)
"""
WORKER = """
import os, time
from contextlib import suppress
from pathlib import Path

rank, first = int(os.environ["RANK"]), Path("first")
if rank == 0:
    Path("draft").write_text(str(os.getpid()))
    Path("draft").rename(first)
else:
    while not first.exists():
        time.sleep(0.01)
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, and is buried
        while Path("/proc", first.read_text(), "stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)
raise ValueError(f"worker {rank} fails")
"""


class Jumping(nn.Module):
    """A network in one of whose forward passes this process's wall clock jumps."""

    def __init__(self, net: nn.Module, at: int, jump: float, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.net, self._at, self._jump, self._passes, self._monkeypatch = net, at, jump, 0, monkeypatch

    def forward(self, images: Any) -> Any:
        self._passes += 1
        if self._passes == self._at:
            real, jump = time.time, self._jump
            self._monkeypatch.setattr(time, "time", lambda: real() + jump)
        return self.net(images)


def _train(world: World, path: Path, jump: float) -> None:
    seed_all(0, 0, 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        net = Jumping(NETS["lively"](), at=4, jump=jump * (1 if world.rank == 0 else -1), monkeypatch=monkeypatch)
        config = configure(**SETTINGS, run_dir=path, time_limit="0:55")
        run_with(config, world, small_digits(260, 50), net)


def test_diverging_clocks_do_not_change_training_on_two_workers(tmp_path: Path) -> None:
    run_in_workers(2, _train, tmp_path / "whole", 0.0)
    for name, jump in (("forth", HOUR), ("back", -HOUR)):
        path = tmp_path / name
        run_in_workers(2, _train, path, jump)
        assert final_weights(path) == final_weights(tmp_path / "whole")
        assert losses(path) == losses(tmp_path / "whole")
        records = [record for record in read_records(path / "metrics.jsonl") if "images_per_second" in record]
        times = [record["time_seconds"] for record in records]
        assert times == sorted(times)
        assert 0 < times[-1] < 60
        assert all(record["images_per_second"] > 1 for record in records)
        assert all(0 < record["epoch_seconds"] < 60 for record in records if record["kind"] == "epoch")
        unix_times = [record["unix_time"] for record in records]
        assert abs(unix_times[-1] - unix_times[0] - jump) < 60  # the clock did jump, and records show it


@pytest.mark.cold
def test_first_failure_is_named_though_the_clock_runs_backwards(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BACKWARDS)
    (tmp_path / "worker.py").write_text(WORKER)
    environment = own_environment(PYTHONPATH=f"{tmp_path}:{own_environment().get('PYTHONPATH', '')}")
    command = [*LOCKSTEP, "run", "-np", "2", "--", sys.executable, "worker.py"]
    done = run(command, tmp_path, environment, timeout=100, cold=True)
    assert done.returncode == 1
    assert "lockstep: worker 0 of 2 failed with exit code 1" in done.stderr
