"""The observer of any program's steps on a device with streams: the device's times, without waits of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import simgpu
import torch
from simulated_gpu import run_on_gpu

from lockstep.diagnosis.observed_steps import ObservedSteps, read_steps
from lockstep.world.observer import Observer, observe

pytestmark = pytest.mark.usefixtures("simulated_gpu")

GPU = torch.device("privateuseone", 0)  # simgpu:0 in its processes
SLOW_US = 20_000  # in each forward pass; the host takes less for a step
STEPS = 12


def _train(path: Path) -> dict[str, int]:
    observer = Observer(path)
    observe(observer)
    model = torch.nn.Linear(4, 1).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    source, images = torch.ones(8, 4).pin_memory(), torch.zeros(8, 4, device=GPU)
    simgpu.delays(copy_us=SLOW_US)
    simgpu.reset_counts()
    for _ in range(STEPS):
        optimizer.zero_grad()
        images.copy_(source, non_blocking=True)
        model(images).mean().backward()
        optimizer.step()
    waits = {kind: number for kind, number in simgpu.counts().items() if "wait" in kind}
    torch.accelerator.synchronize()
    observer.finish()
    return waits


def test_observing_measures_the_device_without_host_waits(tmp_path: Path) -> None:
    assert run_on_gpu(_train, tmp_path / "records") == {}
    observed: ObservedSteps = read_steps(tmp_path / "records")
    assert (observed.steps, observed.samples) == (STEPS, None)
    assert observed.phase_seconds["before_backward"] >= SLOW_US / 2e6
    assert observed.phase_seconds["backward"] < SLOW_US / 2e6
