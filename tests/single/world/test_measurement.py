"""Which steps a measured program's figures are of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.diagnosis import FOLDER, flight_recorder
from lockstep.diagnosis.observed_steps import RESULT_MARK
from lockstep.diagnosis.phases import BEFORE_BACKWARD, parts_of
from lockstep.energy.counters import EnergyCounter
from lockstep.energy.meter import EnergyMeter
from lockstep.files.output import received
from lockstep.world import accelerator
from lockstep.world.measurement import Measurement
from lockstep.world.step_clock import DeviceClock, StepClock


class Ended(BaseException):
    """Stands in for the end of the process."""


class Clock(DeviceClock):
    """A clock of which the measurement reads the end of each step."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(torch.device(device))
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def is_reached(self, timestamp: object) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class Worker:
    """A worker whose steps end at given times, and what it sends."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capfd, self.clock = capfd, Clock()
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv(FOLDER, str(folder))
        monkeypatch.setattr(os, "_exit", self._end)

    @staticmethod
    def _end(code: int) -> None:
        assert code == 0
        raise Ended

    @property
    def sent(self) -> list[dict[str, Any]]:
        return received(self._capfd.readouterr().out.splitlines(), RESULT_MARK)

    def run(self, measured: Measurement, ends: list[float], after_loaders: set[int]) -> None:
        """End steps at these times; a loader ends before those in `after_loaders`.

        Each step has four samples, and each second 1.5 seconds of CPU time.
        """
        measured.now, measured.cpu_now = self.clock.now, lambda: 1.5 * self.clock.time
        measured.clock.clock = self.clock
        for number, end in enumerate(ends, start=1):
            if number in after_loaders:
                measured.loader_ends(lambda: None)  # any object that weak references take
            measured.counts.loaders.samples += 4
            measured.counts.steps = number
            self.clock.time = end
            measured.clock.end()
            measured.step_is_counted()


@pytest.fixture
def worker(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Worker:
    return Worker(capfd, monkeypatch, tmp_path)


def test_steps_beside_a_loaders_end_are_left_out(worker: Worker) -> None:
    with pytest.raises(Ended):
        worker.run(Measurement(2, 3), [10.0, 20.0, 21.0, 22.0, 30.0, 31.0, 90.0], after_loaders={5})
    figures = worker.sent[0]["figures"]
    assert (figures["measured_steps"], figures["steps_per_second"], figures["samples_per_second"]) == (3, 1.0, 4.0)
    assert figures["step_seconds"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert figures["phase_seconds"] == {BEFORE_BACKWARD: 1.0}
    assert figures["utilization"] == pytest.approx(1.5 / torch.get_num_threads())
    assert (figures["memory"], figures["environment"]) == ("resident", None)  # of rank 0 only
    assert figures["peak_memory_bytes"] > 1e7


def test_an_early_end_sends_what_was_measured(worker: Worker) -> None:
    measured = Measurement(0, 100)
    worker.run(measured, [10.0, 20.0, 21.0, 24.0], after_loaders=set())
    measured.finish()
    figures = worker.sent[0]["figures"]
    assert (figures["measured_steps"], figures["step_seconds"]["median"]) == (2, 2.0)


def test_steps_that_all_begin_a_pass_are_an_error(worker: Worker) -> None:
    ends = [float(number) for number in range(200)]
    with pytest.raises(Ended):
        worker.run(Measurement(2, 3), ends, after_loaders=set(range(200)))
    assert [result.keys() for result in worker.sent] == [{"error", "data_too_small"}]


def test_the_trainers_steps_have_its_phases(worker: Worker) -> None:
    measured, clock = Measurement(2, 3), StepClock(torch.device("cpu"))
    measured.follow_trainer(clock)
    for number in range(1, 8):
        if number == 4:
            measured.interrupt()
        for phase in ("data_wait", "forward", "backward", "optimizer", "metrics"):
            clock.begin(phase)
        clock.end()
        if number == 6:
            with pytest.raises(Ended):
                measured.take_step(4)
            break
        measured.take_step(4)
    figures = worker.sent[0]["figures"]
    assert (figures["measured_steps"], figures["samples_per_second"] / figures["steps_per_second"]) == (3, 4.0)
    parts = parts_of(figures["phase_seconds"])
    assert min(parts[name] for name in ("data_wait", "forward", "backward", "optimizer", "other")) > 0
    assert sum(parts.values()) == pytest.approx(sum(figures["phase_seconds"].values()))


def test_a_program_of_warm_up_steps_only_sends_an_error(worker: Worker) -> None:
    measured = Measurement(5, 100)
    worker.run(measured, [10.0, 20.0, 21.0], after_loaders=set())
    measured.finish()
    assert worker.sent == [
        {"error": "the program ended after 3 steps; it must make at least 5 warm-up steps and one to measure"}
    ]


def test_unknown_samples_end_the_program_after_the_warm_up(worker: Worker) -> None:
    measured = Measurement(2, 3, needs_samples=True)
    measured.counts.steps = 2
    with pytest.raises(Ended):
        measured.step_is_counted()
    assert worker.sent == [{"samples_unknown": True}]


@pytest.mark.parametrize(
    ("recorded", "pauses", "exchanges"),
    [
        pytest.param([5, 5, 5, 5, 5], 0, 0, id="none"),
        pytest.param([5, 5, 5, 9, 9], 0, 0, id="beside a loader's end"),
        pytest.param([5, 7, 9, 9, 11], 0, 6, id="collectives"),
        pytest.param([5, 5, 5, 5, 5], 1, 3, id="waits"),
        pytest.param([None] * 5, 0, None, id="unknown"),
    ],
)
def test_exchanges_of_the_measured_steps_are_counted(
    recorded: list[int | None], pauses: int, exchanges: int | None, monkeypatch: pytest.MonkeyPatch, worker: Worker
) -> None:
    measured = Measurement(2, 3)
    monkeypatch.setattr(flight_recorder, "started", lambda: recorded[measured.counts.steps - 2])
    for number in range(1, 7):
        if number == 5:
            measured.loader_ends(lambda: None)
        measured.counts.steps = number
        measured.clock.pauses += pauses
        if number == 6:
            with pytest.raises(Ended):
                measured.step_is_counted()
        else:
            measured.step_is_counted()
    assert worker.sent[0]["figures"]["exchanges"] == exchanges


def test_utilization_is_read_between_counted_steps(accelerators: Callable[..., None], worker: Worker) -> None:
    readings = iter([0.1, 0.2, 0.5, 0.7])  # the first ones in the warm-up
    accelerators(
        utilization=lambda device: next(readings), synchronize=None, overlaps=False, peak_memory=0, name="a device"
    )
    worker.clock = Clock("meta")
    with pytest.raises(Ended):
        worker.run(Measurement(3, 4), [1.0, 2.0, 3.0, 4.0, 9.0, 9.5, 10.0, 10.2], after_loaders={5})
    assert worker.sent[0]["figures"]["utilization"] == pytest.approx(0.6)


@pytest.mark.parametrize(("answer", "share"), [(lambda device: 37, 0.37), (None, None), (lambda device: 1 // 0, None)])
def test_utilization_is_a_share_or_unknown(
    answer: Any, share: float | None, device_module: Callable[..., None]
) -> None:
    device_module(utilization=answer)
    assert accelerator.utilization(torch.device("cpu")) == share


@pytest.mark.parametrize(("seconds", "watts"), [(20.0, [150.0]), (5.0, [])])
def test_power_is_that_of_a_time_that_is_long_enough(seconds: float, watts: list[float]) -> None:
    own = Measurement(2, 10)
    own.now = lambda: seconds
    counter = EnergyCounter("cpu", "package-0", iter([1000.0, 4000.0]).__next__)
    own._energy = EnergyMeter(([counter], ["GPU: a reason"])), 0.0
    power = own._power()
    assert [each[-1] for each in power.get("counter_watts", [])] == watts
    reason = "GPU: a reason" if watts else "it takes 10 s of steps; increase --steps"
    assert power["energy_unread"] == [reason]
