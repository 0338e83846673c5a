"""A worker whose GPU is slow, and not its host, is named: phases are timed by events in the streams."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import simgpu
import straggling
import torch
from simulated_gpu import gpu_world, run_on_gpus
from torch import nn

from lockstep import hvd
from lockstep.diagnosis import stragglers
from lockstep.diagnosis.phases import BEFORE_BACKWARD, HVD_PHASES
from lockstep.hvd.engine import context as engine
from lockstep.hvd.engine.store_watch import STEP, summarize
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")
SLOW_SECONDS = 0.5  # in each step; half of it is more than all else in a step on a busy machine
MIN_STEPS = 6


def _spend(device: torch.device, seconds: float) -> None:
    """Keep the device busy for at least `seconds`, and the host not."""
    value = torch.zeros(1, device=device)
    simgpu.delays(operation_us=round(2e6 * seconds))
    value.add_(1)
    simgpu.delays()


def _train_slowly(world: World, phase: str) -> dict[str, float]:
    hvd.init()
    device = torch.device("simgpu", hvd.local_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), backward_passes_per_step=2
    )

    def spend(in_phase: str) -> None:
        if phase == in_phase and hvd.rank() == 1:
            _spend(device, SLOW_SECONDS)

    for _ in range(4):
        hvd.allreduce(torch.ones(1, device=device))  # waits for the peer
        model(torch.ones(2, 4, device=device)).sum().backward()
        spend(BEFORE_BACKWARD)
        model(torch.ones(2, 4, device=device)).sum().backward()
        spend("backward")
        optimizer.synchronize()  # the same
        spend("optimizer")
        with optimizer.skip_synchronize():
            optimizer.step()
    torch.accelerator.synchronize()
    engine.get().step_times.end()  # of a short step, which may count, too
    steps = engine.get().step_times.take_ready(3)
    hvd.shutdown()
    return summarize(steps)


@pytest.mark.parametrize("phase", HVD_PHASES)
def test_only_the_slow_gpus_own_phase_is_long(phase: str) -> None:
    other, slow = run_on_gpus(2, _train_slowly, phase)
    rest = [seconds[name] for name in HVD_PHASES if name != phase for seconds in (other, slow)]
    assert min(slow[phase], other[STEP]) > SLOW_SECONDS / 2 > max(other[phase], *rest)


def _train(_: World, folder: Path, phase: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    stragglers.MIN_STEPS = straggling.MIN_STEPS = MIN_STEPS  # in this process alone
    with gpu_world() as world:
        spend = partial(_spend, world.device)
        return straggling.train(world, folder, phase, 1, SLOW_SECONDS, settings, spend)


@pytest.mark.parametrize(
    ("strategy", "phase"), [("ddp", "backward"), pytest.param("horovod", "forward", marks=pytest.mark.long)]
)
def test_a_worker_with_a_slow_gpu_is_named(tmp_path: Path, strategy: str, phase: str) -> None:
    records, _ = run_on_gpus(2, _train, tmp_path / "run", phase, {"strategy": strategy})
    (record,) = (record for record in records if record["phase"] == phase)
    assert record["ranks"] == [1]
    assert record["seconds"] > SLOW_SECONDS / 2 > record["others_seconds"]
