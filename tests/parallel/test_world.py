"""The few collectives of World, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import TORCHRUN, run
from worker_group import on_workers

from lockstep.diagnosis.phases import PHASES
from lockstep.errors import ConfigError
from lockstep.run.connect import TrainingWorld
from lockstep.run.stopping import build_stopping
from lockstep.train.worker_times import Times, WorkerTimes
from lockstep.world import accelerator
from lockstep.world.step_clock import StepClock
from lockstep.world.world import World


@on_workers(1, 2, 3)
def test_every_worker_gets_the_same_answers(world: World, size: int) -> None:
    gathered = world.gather({"rank": world.rank, "text": "ü" * world.rank})
    assert gathered == [{"rank": rank, "text": "ü" * rank} for rank in range(size)]
    assert world.from_main([1, "two", None] if world.is_main else "not this") == [1, "two", None]
    sums = world.sum_(torch.tensor([1.0, world.rank], dtype=torch.float64))
    assert sums.tolist() == [size, sum(range(size))]
    assert world.max_(torch.tensor([world.rank, -world.rank])).tolist() == [size - 1, 0]


@on_workers(2)
def test_sums_of_tensors_need_equal_shapes(world: World) -> None:
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    assert own.sum(torch.tensor([[1, world.rank]])).tolist() == [[2, 1]]
    with pytest.raises(ConfigError, match=r"different shapes, \[\[1\], \[2\]\]"):
        own.sum(torch.ones(world.rank + 1))


SCRIPT = """
import contextlib
import pathlib
import time
import torch
from torch.nn.parallel import DistributedDataParallel
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.step_clock import StepClock
from lockstep.world.world import connect

def train(world):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()

with connect(RankInfo.from_environment(), "cpu") as world:
    train(world)
def threads():
    for task in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended since
            yield task.read_text().strip()

while "pt_gloo_runloop" in threads():  # one that has been joined may be listed for a moment
    time.sleep(0.05)
"""


def test_no_communication_thread_outlives_the_connection(tmp_path: Path) -> None:
    """Such a thread may free a tensor while Python ends, which aborts the process now and then."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run([*TORCHRUN, script], tmp_path)
    assert done.returncode == 0, done.stderr


@on_workers(2)
def test_a_default_device_of_the_script_does_not_matter(world: World) -> None:
    """As after torch.set_default_device("cuda"); on "meta" every tensor that was made without a device fails."""
    with torch.device("meta"):
        times = WorkerTimes(world, StepClock(world.device), ())
        times.report(Times(1.0, dict.fromkeys(PHASES, 0.1)), steps=1)
        stopping = build_stopping(world)
        stopping.ask()
        assert accelerator.pinned_like(torch.ones(2, device="cpu")).device == torch.device("cpu")
        assert world.gather(world.rank) == [0, 1]
        assert not stopping.answer()
