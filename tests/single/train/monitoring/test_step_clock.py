"""The clock of a step's phases on a CPU; tests/parallel/simgpu/test_step_clock.py has it on a device."""

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
