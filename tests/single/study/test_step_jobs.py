"""What the output of a study's job says of its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.plan.options import LaunchOptions
from lockstep.study.points import StepPoint
from lockstep.study.step_jobs import about_plan, figures_of, outcome_of, plan_measurement
from lockstep.world.devices import usable_cores

PEER = "RuntimeError: [/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
LAUNCHER = "lockstep: worker 1 of 2 on a failed with exit code 1"
WORKER: dict[str, Any] = {
    "connected": True,
    "exchanges": 4,
    "measured_steps": 4,
    "samples_per_second": 30.0,
    "steps_per_second": 5.0,
    "step_seconds": {"low": 0.1, "median": 0.2, "high": 0.3},
    "phase_seconds": {},
    "waits": [],
    "program": {},
    "utilization": 0.5,
    "backward_passes_per_step": 1,
    "peak_memory_bytes": 7,
    "memory": "process",
    "memory_limit_bytes": 20,
    "device": "cpu",
    "gpu": "",
    "environment": None,
}


@pytest.mark.parametrize(
    ("code", "results", "log", "lacks_memory", "reason"),
    [
        (1, [], ["torch.OutOfMemoryError: CUDA out of memory. Tried", PEER, LAUNCHER], True, "torch.OutOfMemoryError"),
        (
            1,
            [],
            ["RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", LAUNCHER],
            True,
            "RuntimeError",
        ),
        (1, [], ["MemoryError", LAUNCHER], True, "MemoryError"),
        (134, [], ["terminate called after throwing an instance of 'std::bad_alloc'"], True, "terminate called"),
        (0, [{"out_of_memory": "it takes 9 GB"}], [], True, "it takes 9 GB"),
        (
            1,
            [],
            ["a warning: out of memory", "ValueError: x", PEER, LAUNCHER],
            False,
            f"{LAUNCHER[10:]}; ValueError: x",
        ),
        (3, [], [], False, "the launcher's exit code is 3"),
        (0, [], ["MemoryError"], False, "0 of 2 workers measured any steps"),
        (1, [{"error": "it ended after 0 steps"}], ["ValueError: x", LAUNCHER], False, f"{LAUNCHER[10:]}; ValueError"),
        (0, [{"error": "the program ended after 1 steps"}], [], False, "the program ended after 1 steps"),
    ],
)
def test_reason_of_missing_figures_is_found(
    code: int, results: list[dict[str, Any]], log: list[str], lacks_memory: bool, reason: str
) -> None:
    outcome = outcome_of(code, results, log, workers=2)
    assert (bool(outcome.out_of_memory), outcome.reason.startswith(reason)) == (lacks_memory, True)
    assert not outcome.figures


def test_a_counter_that_several_workers_read_counts_once() -> None:
    package, gpus = ["a", "package-0", "cpu", 100.0], [["a", f"GPU {number}", "gpu", 300.0] for number in range(2)]
    workers = [
        {"counter_watts": [package, gpus[0]], "energy_unread": ["DRAM: a reason"]},
        {"counter_watts": [["a", "package-0", "cpu", 101.0], gpus[0]], "energy_unread": ["DRAM: a reason"]},
        {"counter_watts": [["a", "package-0", "cpu", 102.0], gpus[1]]},
        {"counter_watts": [["b", "package-0", "cpu", 50.0]]},
    ]
    power = figures_of([{**WORKER, **each} for each in workers], len(workers))
    assert power["watts"] == pytest.approx({"cpu": 150.0, "gpu": 600.0}, rel=0.02)
    assert power["energy_unread"] == ["DRAM: a reason"]
    assert "watts" not in figures_of([WORKER], 1)


def test_figures_of_a_job_are_those_of_all_workers() -> None:
    other = {**WORKER, "measured_steps": 3, "samples_per_second": 10.0, "utilization": 0.7, "peak_memory_bytes": 9}
    figures = figures_of([WORKER, {**other, "memory_limit_bytes": 10}], 2)
    assert (figures["samples_per_second"], figures["samples_per_step"], figures["steps_per_second"]) == (40.0, 8.0, 5.0)
    assert (figures["measured_steps"], figures["peak_memory_bytes"], figures["memory_limit_bytes"]) == (3, 9, 10)
    assert figures["utilization"] == pytest.approx(0.6)


def test_each_point_of_a_study_has_the_threads_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    most = usable_cores()
    points = [StepPoint(workers, None, (), 0) for workers in (1, most)]
    plans = [plan_measurement(LaunchOptions(), point, ["true"], "1,2,1,free", Path(), most) for point in points]
    assert [about_plan(plan)["threads"] for plan in plans] == [1, 1]
