"""The clock of a step's phases."""

from __future__ import annotations

import time

import pytest
import torch

from lockstep.train.monitoring.step_clock import StepClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list, to be moved by hand."""
    moment = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: moment[0])
    return moment


def test_phases_add_up_to_the_step_and_come_again_within_it(now: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    for phase, seconds in (("forward", 2.0), ("backward", 3.0), ("forward", 4.0), ("optimizer", 5.0)):
        clock.begin(phase)  # type: ignore[arg-type]
        now[0] += seconds
    clock.end()
    assert clock.take() == [{"forward": 6.0, "backward": 3.0, "optimizer": 5.0}]
    assert clock.take() == []


def test_what_lies_between_two_steps_belongs_to_none(now: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    for seconds in (1.0, 2.0):
        clock.begin("data_wait")
        now[0] += seconds
        clock.end()
        now[0] += 50.0
    assert clock.take() == [{"data_wait": 1.0}, {"data_wait": 2.0}]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_phases_are_the_devices_time_and_nobody_waits_for_it() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    clock = StepClock(matrix.device)
    for _ in range(2):  # the first one warms up
        start = time.perf_counter()
        clock.begin("forward")
        for _ in range(50):
            matrix = matrix @ matrix / 4096
        clock.begin("optimizer")
        clock.end()
        asked = time.perf_counter() - start
        (step,) = clock.take()
        whole = time.perf_counter() - start
    assert asked < step["forward"] <= whole
    assert step["optimizer"] < 0.1 * step["forward"]
