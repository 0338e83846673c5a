"""Which steps a measured program's figures are of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.diagnosis import flight_recorder
from lockstep.diagnosis.phases import parts_of
from lockstep.world import accelerator, measurement
from lockstep.world.measurement import Measurement
from lockstep.world.step_clock import DeviceClock, StepClock


class Ended(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the worker sends, of a program whose steps end at the seconds in `_run`."""
    results: list[dict[str, Any]] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(measurement, "_send", results.append)

    def end(_: Measurement) -> None:
        raise Ended

    monkeypatch.setattr(Measurement, "_end_program", end)
    return results


def _run(measured: Measurement, monkeypatch: pytest.MonkeyPatch, ends: list[float], after_loaders: set[int]) -> None:
    """End steps at these times; a loader ends before those in `after_loaders`.

    Each step has four samples, and each second 1.5 seconds of CPU time.
    """
    phases: list[dict[str, float]] = []

    def take() -> list[dict[str, float]]:
        taken = list(phases)
        phases.clear()
        return taken

    monkeypatch.setattr(measured.clock, "take", take)
    for number, (start, end) in enumerate(zip([0.0, *ends], ends, strict=False), start=1):
        if number in after_loaders:
            measured.loader_ends(lambda: None)  # any object that weak references take
        measured.loaders.samples += 4
        measured.steps = number
        phases.append({"forward": end - start})
        monkeypatch.setattr(measurement.time, "perf_counter", lambda end=end: end)
        monkeypatch.setattr(measurement.time, "process_time", lambda end=end: 1.5 * end)
        measured.step_is_counted()


def test_steps_beside_a_loaders_end_are_left_out(monkeypatch: pytest.MonkeyPatch, sent: list[dict[str, Any]]) -> None:
    with pytest.raises(Ended):
        _run(Measurement(2, 3), monkeypatch, [10.0, 20.0, 21.0, 22.0, 30.0, 31.0, 90.0], after_loaders={5})
    figures = sent[0]["figures"]
    assert (figures["measured_steps"], figures["steps_per_second"], figures["samples_per_second"]) == (3, 1.0, 4.0)
    assert figures["step_seconds"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert figures["phase_seconds"] == {"forward": 1.0}
    assert figures["utilization"] == pytest.approx(1.5 / torch.get_num_threads())
    assert (figures["memory"], figures["environment"]) == ("resident", None)  # of rank 0 only
    assert figures["peak_memory_bytes"] > 1e7


def test_an_early_end_sends_what_was_measured(monkeypatch: pytest.MonkeyPatch, sent: list[dict[str, Any]]) -> None:
    measured = Measurement(0, 100)
    _run(measured, monkeypatch, [10.0, 20.0, 21.0, 24.0], after_loaders=set())
    measured.finish()
    assert sent[0]["figures"]["measured_steps"] == 2
    assert sent[0]["figures"]["step_seconds"]["median"] == 2.0


def test_steps_that_all_begin_a_pass_are_an_error(monkeypatch: pytest.MonkeyPatch, sent: list[dict[str, Any]]) -> None:
    ends = [float(number) for number in range(200)]
    with pytest.raises(Ended):
        _run(Measurement(2, 3), monkeypatch, ends, after_loaders=set(range(200)))
    assert [result.keys() for result in sent] == [{"error", "data_too_small"}]


def test_the_trainers_steps_have_its_phases(monkeypatch: pytest.MonkeyPatch, sent: list[dict[str, Any]]) -> None:
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
                measured._count_told_step(4)
            break
        measured._count_told_step(4)
    figures = sent[0]["figures"]
    assert (figures["measured_steps"], figures["samples_per_second"] / figures["steps_per_second"]) == (3, 4.0)
    parts = parts_of(figures["phase_seconds"])
    assert min(parts[name] for name in ("data_wait", "forward", "backward", "optimizer", "other")) > 0
    assert sum(parts.values()) == pytest.approx(sum(figures["phase_seconds"].values()))


def test_a_program_of_warm_up_steps_only_sends_an_error(
    monkeypatch: pytest.MonkeyPatch, sent: list[dict[str, Any]]
) -> None:
    measured = Measurement(5, 100)
    _run(measured, monkeypatch, [10.0, 20.0, 21.0], after_loaders=set())
    measured.finish()
    assert sent == [
        {"error": "the program ended after 3 steps; it must make at least 5 warm-up steps and one to measure"}
    ]


def test_unknown_samples_end_the_program_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, sent: list[dict[str, Any]]
) -> None:
    measured = Measurement(2, 3, needs_samples=True)
    measured.steps = 2
    with pytest.raises(Ended):
        measured.step_is_counted()
    assert sent == [{"samples_unknown": True}]


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
    recorded: list[int | None],
    pauses: int,
    exchanges: int | None,
    monkeypatch: pytest.MonkeyPatch,
    sent: list[dict[str, Any]],
) -> None:
    measured = Measurement(2, 3)
    monkeypatch.setattr(flight_recorder, "started", lambda: recorded[measured.steps - 2])
    for number in range(1, 7):
        if number == 5:
            measured.loader_ends(lambda: None)
        measured.steps = number
        measured.clock.pauses += pauses
        if number == 6:
            with pytest.raises(Ended):
                measured.step_is_counted()
        else:
            measured.step_is_counted()
    assert sent[0]["figures"]["exchanges"] == exchanges


def test_utilization_is_read_between_counted_steps(monkeypatch: pytest.MonkeyPatch, sent: list[dict[str, Any]]) -> None:
    readings = iter([0.1, 0.2, 0.5, 0.7])  # the first ones in the warm-up
    monkeypatch.setattr(accelerator, "utilization", lambda device: next(readings))
    monkeypatch.setattr(accelerator, "synchronize", lambda device: None)
    measured = Measurement(3, 4)
    measured.clock.clock = DeviceClock(torch.device("meta"))
    monkeypatch.setattr(measured, "_print_figures", lambda: None)  # this device has none
    with pytest.raises(Ended):
        _run(measured, monkeypatch, [1.0, 2.0, 3.0, 4.0, 9.0, 9.5, 10.0, 10.2], after_loaders={5})
    assert measured._utilization("meta") == pytest.approx(0.6)


@pytest.mark.parametrize(("answer", "share"), [(lambda device: 37, 0.37), (None, None), (lambda device: 1 // 0, None)])
def test_utilization_is_a_share_or_unknown(answer: Any, share: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_module", lambda kind: SimpleNamespace(utilization=answer))
    assert accelerator.utilization(torch.device("cpu")) == share
