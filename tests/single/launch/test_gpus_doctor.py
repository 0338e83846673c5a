"""What `lockstep doctor` makes of a trial of a machine's GPUs, with Gloo in their library's place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo, Store

from lockstep.launch import gpus_doctor, machine_doctor
from lockstep.launch.gpus_doctor import reduce_together, try_gpus
from lockstep.world import accelerator


class Lossy:
    """A group whose all-reduces change nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return SimpleNamespace(wait=lambda: None)


def _connect(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    return ProcessGroupGloo(store, rank, size, timeout)


def _busy(*_: object) -> Any:
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\ndetails")


@pytest.mark.parametrize(
    ("group", "card", "found", "error"),
    [
        (_connect, "PCI {}", "2 GPUs, all-reduce at ", ""),
        (_connect, "PCI 0", "not tried, because some of these devices are parts of one card", ""),
        (Lossy, "PCI {}", "", "all-reduces give wrong sums"),
        (_busy, "PCI {}", "", "CUDA error: all CUDA-capable devices are busy or unavailable"),
    ],
)
def test_trial_checks_the_sums(
    monkeypatch: pytest.MonkeyPatch, group: Callable[..., Any], card: str, found: str, error: str
) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: None)
    monkeypatch.setattr(accelerator, "card", lambda device: card.format(device.index))
    monkeypatch.setattr(accelerator, "group", group)
    monkeypatch.setattr(gpus_doctor, "REDUCED_BYTES", 4000)
    monkeypatch.setattr(gpus_doctor, "TRIAL_SECONDS", 0.01)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda rank: reduce_together(store, rank, 2), range(2)))
    for described, failure in results:
        assert described.startswith(found)
        assert failure == error


def test_gpus_that_do_not_answer_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process is ready, but does not take part."""
    store = HashStore()
    store.set("ready/1", "null")
    monkeypatch.setattr(accelerator, "kind", lambda: None)
    monkeypatch.setattr(gpus_doctor, "LIMIT_SECONDS", 0.05)
    assert reduce_together(store, 0, 2) == ("", "no answer within 0 s")
    store.set("card/1", "null")  # ends its thread


WORKS = "set it for jobs here until direct access between the GPUs works"
LOOK = "check what else uses the GPUs, and the driver's messages (dmesg)"


@pytest.mark.parametrize(
    ("library", "outcomes", "expected"),
    [
        ("nccl", [("2 GPUs", "")], ("nccl: 2 GPUs", "")),
        ("nccl", [("", "no answer"), ("2 GPUs", "")], f"no answer; works with NCCL_P2P_DISABLE=1: {WORKS}"),
        ("nccl", [("", "busy"), ("", "busy")], f"busy, also with NCCL_P2P_DISABLE=1; {LOOK}"),
        ("xccl", [("", "busy")], f"busy; {LOOK}"),
    ],
)
def test_failed_trial_is_repeated_without_direct_access(
    monkeypatch: pytest.MonkeyPatch, library: str, outcomes: list[tuple[str, str]], expected: Any
) -> None:
    asked: list[Mapping[str, str]] = []

    def run(count: int, variables: Mapping[str, str]) -> tuple[str, str]:
        asked.append(variables)
        return outcomes[len(asked) - 1]

    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    monkeypatch.setattr(accelerator, "has_collectives", lambda kind: True)
    monkeypatch.setattr(accelerator, "backend", lambda kind: library)
    monkeypatch.setattr(gpus_doctor, "_run", run)
    tried = try_gpus()
    assert tried
    if isinstance(expected, str):
        assert tried[0] == f"{library}: all-reduces fail"
        assert tried[1].startswith(expected)
    else:
        assert tried == expected
    assert asked == [{}, {"NCCL_P2P_DISABLE": "1"}][: len(outcomes)]


@pytest.mark.parametrize(("kind", "count"), [(None, 0), ("cuda", 1), ("mps", 2)])
def test_fewer_than_two_gpus_are_not_tried(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: kind)
    monkeypatch.setattr(accelerator, "count", lambda: count)
    assert try_gpus() is None
    assert list(machine_doctor._gpus_together()) == []


REPORT = """
printf '\\nn1:1:2 [0] shm.cc:7 NCCL WARN no space\\n' > "$0/log.$1"
case $1 in 0) echo '["", "no answer within 30 s"]';; *) echo '["", "shm fails"]';; esac
"""


@pytest.mark.parametrize(
    ("script", "error"), [(REPORT, "shm fails: no space"), ("exit 7", "a trial process exited with code 7")]
)
def test_trial_reports_the_cause_before_its_consequences(
    monkeypatch: pytest.MonkeyPatch, script: str, error: str
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.setattr(gpus_doctor, "WORKER", ("-c", script))
    assert gpus_doctor._run(2, {}) == ("", error)
