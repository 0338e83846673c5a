"""A worker that stands still for a while, as on a host that swaps: the others wait for it, and nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from runs import NETS, final_weights, losses, small_digits
from torch import nn
from worker_group import run_in_workers

from lockstep.files.jsonl import read_records
from lockstep.seeding import seed_all
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World

SETTINGS = {"epochs": 2, "global_batch_size": 60, "log_every": 1, "lr": 0.05, "lr_scaling": "none", "track": ()}


class Standing(nn.Module):
    """A network whose process stands still for some seconds in one of its forward passes."""

    def __init__(self, net: nn.Module, at: int, seconds: float):
        super().__init__()
        self.net, self._at, self._seconds, self._passes = net, at, seconds, 0

    def forward(self, images: Any) -> Any:
        self._passes += 1
        if self._passes == self._at:
            _stand_still(self._seconds)
        return self.net(images)


def _stand_still(seconds: float) -> None:
    """Stop this process, all its threads included, until a child of it lets it go on."""
    child = multiprocessing.get_context("fork").Process(target=_wake, args=(os.getpid(), seconds))
    child.start()
    os.kill(os.getpid(), signal.SIGSTOP)
    child.kill()
    child.join()


def _wake(pid: int, seconds: float) -> None:
    time.sleep(seconds)
    while True:  # it may not even have stopped yet
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)


def _train(world: World, path: Path, seconds: float) -> None:
    seed_all(0, 0, 0)
    net: nn.Module = NETS["lively"]()
    at = 4 if seconds and world.rank == 1 else 0
    config = configure(**SETTINGS, run_dir=path)
    run_with(config, world, small_digits(260, 50), Standing(net, at, seconds))


@pytest.mark.parametrize("seconds", [2.0, pytest.param(20.0, marks=pytest.mark.long)])
def test_a_worker_that_stands_still_is_waited_for(tmp_path: Path, seconds: float) -> None:
    run_in_workers(2, _train, tmp_path / "whole", 0.0)
    start = time.monotonic()
    run_in_workers(2, _train, tmp_path / "slow", seconds)
    assert time.monotonic() - start > seconds
    assert final_weights(tmp_path / "slow") == final_weights(tmp_path / "whole")
    assert losses(tmp_path / "slow") == losses(tmp_path / "whole")
    rates = [r["images_per_second"] for r in read_records(tmp_path / "slow" / "metrics.jsonl") if r["kind"] == "step"]
    assert min(rates) < 60 / seconds  # the wait is seen where it was
