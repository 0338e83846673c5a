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
from lockstep.diagnosis.observed_steps import PHASES, usual_seconds
from lockstep.diagnosis.phases import BEFORE_BACKWARD
from lockstep.hvd.engine import context as engine
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")
SLOW_SECONDS = 0.5  # in each step; half of it is more than all else in a step on a busy machine
MIN_STEPS = 6
OTHERS = (BEFORE_BACKWARD, "forward", "optimizer")
MEASURED = ("backward", *OTHERS)


def _spend(device: torch.device, seconds: float) -> None:
    """Keep the device busy for at least `seconds`, and the host not."""
    value = torch.zeros(1, device=device)
    simgpu.delays(operation_us=round(2e6 * seconds))
    value.add_(1)
    simgpu.delays()


class Spend(torch.autograd.Function):
    """Return the input; keep the device busy in the backward pass."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        _spend(gradients[0].device, context.seconds)
        return gradients[0], None


class SlowSGD(torch.optim.SGD):
    """SGD whose step keeps the device busy."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        _spend(self.param_groups[0]["params"][0].device, self.seconds)
        return super().step(closure)


def _train_slowly(world: World, phase: str) -> dict[str, float]:
    hvd.init()
    device = torch.device("simgpu", hvd.local_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(device)
    slow = {phase: SLOW_SECONDS} if hvd.rank() == 1 else {}
    SlowSGD.seconds = slow.get("optimizer", 0.0)
    optimizer = hvd.DistributedOptimizer(SlowSGD(model.parameters(), 0.1), model.named_parameters())
    for _ in range(4):
        hvd.allreduce(torch.ones(1, device=device))  # waits for the peer
        _spend(device, slow.get(BEFORE_BACKWARD, 0.0))
        outputs = model(torch.ones(2, 4, device=device))
        _spend(device, slow.get("forward", 0.0))
        Spend.apply(outputs, slow.get("backward", 0.0)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    torch.accelerator.synchronize()
    engine.get().step_times.end()  # of a short step, which may count, too
    steps = engine.get().step_times.take_ready()
    hvd.shutdown()
    seconds: dict[str, float] = dict(zip(PHASES, usual_seconds(steps), strict=True))
    return seconds


@pytest.mark.parametrize("phase", ["backward", *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)])
def test_only_the_slow_gpus_own_phase_is_long(phase: str) -> None:
    other, slow = run_on_gpus(2, _train_slowly, phase)
    rest = [seconds[name] for name in MEASURED if name != phase for seconds in (other, slow)]
    assert min(slow[phase], sum(other.values())) > SLOW_SECONDS / 2 > max(other[phase], *rest)


def _train(_: World, folder: Path, phase: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    with gpu_world() as world:
        spend = partial(_spend, world.device)
        return straggling.train(world, folder, phase, 1, SLOW_SECONDS, settings, spend, MIN_STEPS)


@pytest.mark.parametrize(
    ("strategy", "phase"), [("ddp", "backward"), pytest.param("horovod", "forward", marks=pytest.mark.long)]
)
def test_a_worker_with_a_slow_gpu_is_named(tmp_path: Path, strategy: str, phase: str) -> None:
    records, _ = run_on_gpus(2, _train, tmp_path / "run", phase, {"strategy": strategy})
    (record,) = (record for record in records if record["phase"] == phase)
    assert record["ranks"] == [1]
    assert record["seconds"] > SLOW_SECONDS / 2 > record["others_seconds"]
