"""The observer of any program's steps on a device with streams: the device's times, without waits of the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import simgpu
import torch
from simulated_gpu import gpu_world, run_on_gpu, run_on_gpus
from torch.utils.data import DataLoader

from lockstep.diagnosis.board import Board
from lockstep.diagnosis.observed_steps import ObservedSteps
from lockstep.world import accelerator, measurement
from lockstep.world.observer import Observer, observe
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")

GPU = torch.device("privateuseone", 0)  # simgpu:0 in its processes
SLOW_US = 20_000  # in each forward pass; the host takes less for a step
OPERATION_US = 2000  # far more than the host takes to enqueue an operation
STEPS = 12
LONG_SECONDS = 0.2  # more than all else in a step on a busy machine


def _train(observer: Observer) -> None:
    """Train; each step takes SLOW_US on the device and less on the host."""
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


def _observe(folder: Path) -> tuple[dict[str, int], ObservedSteps]:
    observer = Observer(Board(folder, rank=0))
    _train(observer)
    waits = {kind: number for kind, number in simgpu.counts().items() if "wait" in kind}
    torch.accelerator.synchronize()
    observer.finish()
    return waits, observer.counts.published


def _train_with_buffers(world: World) -> dict[str, float]:
    """Train with DDP; rank 0 takes long before each step, so rank 1's device waits for its buffers in forward."""
    with gpu_world() as gpu:
        observer = Observer()
        observe(observer)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        replica = torch.nn.parallel.DistributedDataParallel(model.to(gpu.device), device_ids=[gpu.device.index])
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
        images = [(torch.ones(4),)] * 8 * 6
        for (batch,) in DataLoader(images, 8):
            if gpu.rank == 0:
                simgpu.delays(operation_us=round(2e6 * LONG_SECONDS))  # half of it at least
                batch = batch.to(gpu.device).add(1)
                simgpu.delays()
            replica(batch.to(gpu.device)).mean().backward()
            optimizer.step()
        torch.accelerator.synchronize()
        observer.finish()
        seconds: dict[str, float] = {**observer.counts.published.per_step}
        return seconds


def _wait(reads: str) -> float:
    """Train with values that are read in each step; return the time in which the host waited."""
    observer = Observer()
    observe(observer)
    model = torch.nn.Linear(4, 1).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.ones(8, 4, device=GPU)
    simgpu.delays(operation_us=OPERATION_US)
    for _ in range(STEPS):
        loss = model(images).mean()
        loss.backward()
        if reads == "before":
            loss.item()
        optimizer.step()
        if reads == "after":
            loss.item()
    torch.accelerator.synchronize()
    observer.clock.take()
    return observer.clock.take_host_wait()


def _measure() -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    os.environ["RANK"] = "0"
    measurement._send = sent.append
    measurement.Measurement._end_program = lambda self: self.turn_off()  # type: ignore[assignment, method-assign]
    _train(measurement.Measurement(2, 5))
    return sent


def _measure_with_driver() -> list[dict[str, Any]]:
    measurement.UTILIZATION_SECONDS = 0.001
    accelerator.utilization = lambda device: 0.5 if device.type != "cpu" else None
    return _measure()


def test_observing_measures_the_device_without_host_waits(tmp_path: Path) -> None:
    waits, observed = run_on_gpu(_observe, tmp_path)
    assert waits == {}
    assert observed.state.step == 10
    assert observed.state.began != observed.state.weights
    assert observed.state.gradients
    assert (observed.steps, observed.samples) == (STEPS, None)
    assert observed.per_step["before_backward"] >= SLOW_US / 2e6


@pytest.mark.parametrize("reads", ["before", "after"])
def test_waits_of_the_host_are_found(reads: str) -> None:
    assert run_on_gpu(_wait, reads) >= OPERATION_US / 1e6


def test_a_host_that_runs_ahead_does_not_wait() -> None:
    assert run_on_gpu(_wait, "") == 0.0


def test_a_measurement_ends_when_the_device_has_finished() -> None:
    (result,) = run_on_gpu(_measure)
    figures = result["figures"]
    assert figures["measured_steps"] == 5
    assert figures["steps_per_second"] <= 2e6 / SLOW_US  # a delay is drawn between half of it and all
    assert figures["phase_seconds"]["before_backward"] >= SLOW_US / 2e6
    assert figures["device"] != "cpu"
    assert (figures["memory"], figures["utilization"]) == ("device", None)  # no driver's library tells
    assert figures["gpu"] in figures["environment"]["gpus"]


def test_waiting_for_buffers_in_the_forward_pass_is_waiting() -> None:
    slow, other = run_on_gpus(2, _train_with_buffers)
    assert slow["forward"] >= LONG_SECONDS > other["forward"]
    assert other["reduction"] >= LONG_SECONDS / 2


def test_readings_while_the_device_finishes_count() -> None:
    (result,) = run_on_gpu(_measure_with_driver)
    assert result["figures"]["utilization"] == 0.5
