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

from lockstep.hvd.engine.settings import NO_TIMEOUT
from lockstep.hvd.engine.transfers import SetConnections, staging_reason


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


def _connected(accelerators: Callable[..., None], group: Any = None, stream: Any = None) -> SetConnections:
    """The first of two workers after its first operation on a GPU, with this group and stream."""
    accelerators(
        card="GPU-a", has_collectives=True, new_stream=lambda *_, **__: stream, on=nullcontext, use=None, group=group
    )
    store = HashStore()
    store.set("exchanged/1", json.dumps("another GPU-a"))
    connections = SetConnections(object(), store, [0, 1], 0)
    with connections.on(torch.device("cuda", 3)):
        return connections


def test_an_abort_that_hangs_is_left_behind(accelerators: Callable[..., None]) -> None:
    released, ended = threading.Event(), threading.Event()
    stream = SimpleNamespace(synchronize=ended.set)
    connections = _connected(accelerators, SimpleNamespace(abort=released.wait), stream)
    connections.abort(seconds=0.05)
    assert not ended.is_set()
    released.set()
    assert ended.wait(60)


def _broken() -> bool:
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize(("query", "stuck"), [(lambda: True, False), (lambda: False, True), (_broken, True)])
def test_a_device_that_does_not_end_its_work_is_stuck(
    query: Callable[[], bool], stuck: bool, accelerators: Callable[..., None]
) -> None:
    assert not SetConnections(None, HashStore(), [0], 0).is_stuck(0.0)
    assert _connected(accelerators, "group", SimpleNamespace(query=query)).is_stuck(0.05) is stuck


def test_nccl_group_is_created_once_and_has_no_timeout(accelerators: Callable[..., None]) -> None:
    called: list[Any] = []
    connections = _connected(accelerators, group=lambda *arguments: called.append(arguments))
    device = torch.device("cuda", 3)
    accelerators(use=called.append)
    with connections.on(device):
        pass
    ((store, *arguments),) = called
    assert arguments == [0, 2, device, NO_TIMEOUT]
    assert json.loads(store.get("exchanged/0")) == f"{socket.gethostname()} GPU-a"  # which another host may have, too
