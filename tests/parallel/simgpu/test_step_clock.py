"""The clock of a step's phases measures the device's time, and the host does not wait for recent work."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest
import simgpu
import torch
from simulated_gpu import on_gpus, run_on_gpu

from lockstep.diagnosis.phases import Phase
from lockstep.world.step_clock import MAX_MARKS, StepClock

pytestmark = pytest.mark.usefixtures("simulated_gpu")

GPU = torch.device("privateuseone", 0)  # simgpu:0 in its processes
SLOW_US = 1000


def _slow_phase(step: int) -> Phase:
    return ("forward", "backward")[step % 2]


def _time_steps(steps: int, passes: int) -> dict[str, Any]:
    """Time steps on a device that does nothing until the host waits for it."""
    clock, start, most_marks = StepClock(GPU), time.perf_counter(), 0
    stream = torch.accelerator.current_stream(GPU)
    source, target = torch.ones(1).pin_memory(), torch.zeros(1, device=GPU)
    simgpu.delays(copy_us=SLOW_US)
    simgpu.reset_counts()
    with ExitStack() as device_idle:

        def wait_for(timestamp: Any) -> None:
            device_idle.close()
            timestamp.synchronize()
            device_idle.enter_context(simgpu.held(stream))

        clock.clock.wait_for = wait_for
        device_idle.enter_context(simgpu.held(stream))
        for step in range(steps):
            for number in range(passes):
                for phase in ("forward", "backward"):
                    clock.begin(phase)
                    target.add_(1)
                    if number == 0 and phase == _slow_phase(step):
                        target.copy_(source, non_blocking=True)
            clock.end()
            most_marks = max(most_marks, sum(map(len, clock._unread)))
    result = {
        "waits": {kind for kind in simgpu.counts() if "wait" in kind},
        "work behind waits": simgpu.event_waits(),
        "most marks": most_marks,
        "times": clock.take(),
        "seconds": time.perf_counter() - start,
    }
    assert clock.take() == []
    return result


@pytest.mark.parametrize(
    ("steps", "passes", "most_marks", "most_waits"),
    [(2 * MAX_MARKS, 1, MAX_MARKS, 12), (10, MAX_MARKS, 4 * MAX_MARKS + 3, 10)],
)
def test_phases_take_the_devices_time(steps: int, passes: int, most_marks: int, most_waits: int) -> None:
    timed = run_on_gpu(_time_steps, steps, passes)
    times = timed["times"]
    assert [set(step) for step in times] == [{"forward", "backward"}] * steps
    assert all(step[_slow_phase(number)] >= SLOW_US / 2e6 for number, step in enumerate(times))
    assert sum(sum(step.values()) for step in times) <= timed["seconds"]
    assert timed["most marks"] <= most_marks
    assert timed["waits"] == {"host wait: event"}
    assert min(timed["work behind waits"]) >= MAX_MARKS // 4
    assert len(timed["work behind waits"]) <= most_waits


@on_gpus()
def test_forgotten_times_do_not_count() -> None:
    clock = StepClock(GPU)
    clock.begin("data_wait")
    clock.end()
    clock.begin("forward")  # of a step that is not counted
    clock.forget()
    clock.begin("optimizer")
    clock.end()
    (step,) = clock.take()
    assert set(step) == {"optimizer"}
