"""Which steps a measured program's figures are of."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.world import measurement
from lockstep.world.measurement import Measurement


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
    """End steps at these times; a loader ends before those in `after_loaders`. Each step has four samples."""
    phases: list[dict[str, float]] = []

    def take() -> list[dict[str, float]]:
        taken = list(phases)
        phases.clear()
        return taken

    monkeypatch.setattr(measured.clock, "take", take)
    for number, (start, end) in enumerate(zip([0.0, *ends], ends, strict=False), start=1):
        if number in after_loaders:
            measured.loader_ends(lambda: None)  # any object that weak references take
        measured.samples += 4
        measured.steps = number
        phases.append({"forward": end - start})
        monkeypatch.setattr(measurement.time, "perf_counter", lambda end=end: end)
        measured.step_is_counted()


def test_steps_beside_a_loaders_end_are_left_out(monkeypatch: pytest.MonkeyPatch, sent: list[dict[str, Any]]) -> None:
    with pytest.raises(Ended):
        _run(Measurement(2, 3), monkeypatch, [10.0, 20.0, 21.0, 22.0, 30.0, 31.0, 90.0], after_loaders={5})
    figures = sent[0]["figures"]
    assert (figures["measured_steps"], figures["steps_per_second"], figures["samples_per_second"]) == (3, 1.0, 4.0)
    assert figures["step_seconds"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert figures["phase_seconds"] == {"forward": 1.0}


def test_an_early_end_sends_what_was_measured(monkeypatch: pytest.MonkeyPatch, sent: list[dict[str, Any]]) -> None:
    measured = Measurement(0, 100)
    _run(measured, monkeypatch, [10.0, 20.0, 21.0, 24.0], after_loaders=set())
    measured.finish()
    assert sent[0]["figures"]["measured_steps"] == 2
    assert sent[0]["figures"]["step_seconds"]["median"] == 2.0


def test_a_program_of_warm_up_steps_only_sends_an_error(
    monkeypatch: pytest.MonkeyPatch, sent: list[dict[str, Any]]
) -> None:
    measured = Measurement(5, 100)
    _run(measured, monkeypatch, [10.0, 20.0, 21.0], after_loaders=set())
    measured.finish()
    assert sent == [
        {"error": "the program ended after 3 steps; it must make at least 5 warm-up steps and one to measure"}
    ]
