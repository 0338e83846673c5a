"""Which workers can use NCCL."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from lockstep.hvd.engine import transfers
from lockstep.hvd.engine.settings import NO_TIMEOUT
from lockstep.hvd.engine.transfers import SetConnections, staging_reason
from lockstep.world import accelerator


def _asked_by_the_last(gpus: Sequence[str]) -> str | None:
    store = HashStore()
    for rank, gpu in enumerate(gpus):
        store.set(f"exchanged/{rank}", json.dumps(gpu))
    return staging_reason(store, len(gpus) - 1, len(gpus), gpus[-1])


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        (["GPU-a", "GPU-b", "GPU-c"], None),
        (["GPU-a", "GPU-b", "GPU-a"], "ranks 0 and 2 share a GPU"),
        (["", "GPU-b"], "rank 0 was built without collectives"),
    ],
)
def test_nccl_needs_a_gpu_for_each_worker(
    monkeypatch: pytest.MonkeyPatch, gpus: Sequence[str], reason: str | None
) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    why = _asked_by_the_last(gpus)
    assert why is None if reason is None else why is not None and reason in why


def test_workers_share_a_gpu_with_nccl_if_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert _asked_by_the_last(["GPU-a", "GPU-a"]) is None


def test_an_abort_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "use", lambda device: None)
    monkeypatch.setattr(transfers, "ABORT_SECONDS", 0.05)
    one = SetConnections(None, HashStore(), [0], 0)
    released, ended = threading.Event(), threading.Event()
    one._group = SimpleNamespace(abort=released.wait)
    one._stream = SimpleNamespace(synchronize=ended.set)
    one.abort()
    assert not ended.is_set()
    released.set()
    assert ended.wait(60)


def _broken() -> bool:
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize(("query", "stuck"), [(lambda: True, False), (lambda: False, True), (_broken, True)])
def test_a_device_that_does_not_end_its_work_is_stuck(query: Callable[[], bool], stuck: bool) -> None:
    one = SetConnections(None, HashStore(), [0], 0)
    assert not one.is_stuck(0.0)
    one._group, one._stream = object(), SimpleNamespace(query=query)
    assert one.is_stuck(0.05) is stuck


def test_nccl_group_is_created_once_and_has_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(accelerator, "card", lambda device: "GPU-a")
    monkeypatch.setattr(accelerator, "has_collectives", lambda kind: True)
    monkeypatch.setattr(accelerator, "new_stream", lambda device, urgent: None)
    monkeypatch.setattr(accelerator, "on", nullcontext)
    monkeypatch.setattr(accelerator, "use", lambda device: called.append(device))
    monkeypatch.setattr(accelerator, "group", lambda *arguments: called.append(arguments))
    store = HashStore()
    store.set("exchanged/1", json.dumps("another GPU-a"))
    one = SetConnections(object(), store, [0, 1], 0)
    device = torch.device("cuda", 3)
    for _ in range(2):
        with one.on(device):
            pass
    first, (_, *arguments) = called
    assert first == device
    assert arguments == [0, 2, device, NO_TIMEOUT]
    assert json.loads(store.get("exchanged/0")) == f"{socket.gethostname()} GPU-a"  # which another host may have, too
