"""What the output of a study's job says of its workers."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.study.step_jobs import _power, outcome_of

PEER = "RuntimeError: [/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
LAUNCHER = "lockstep: worker 1 of 2 on a failed with exit code 1"


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
    power = _power(workers)
    assert power["watts"] == pytest.approx({"cpu": 150.0, "gpu": 600.0}, rel=0.02)
    assert power["energy_unread"] == ["DRAM: a reason"]
    assert _power([{}]) == {}
