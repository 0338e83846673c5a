"""Which workers can use NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from lockstep import accelerator
from lockstep.hvd.links import Links, staging_reason
from lockstep.hvd.settings import NO_TIMEOUT


def _asked_by_the_last(gpus: Sequence[str]) -> str | None:
    store = HashStore()
    for rank, gpu in enumerate(gpus):
        store.set(f"device/{rank}", gpu)
    return staging_reason(store, len(gpus) - 1, len(gpus), gpus[-1])


def test_workers_with_a_gpu_each_use_nccl() -> None:
    assert _asked_by_the_last(["GPU-a", "GPU-b", "GPU-c"]) is None


def test_workers_that_share_a_gpu_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    why = _asked_by_the_last(["GPU-a", "GPU-b", "GPU-a"])
    assert why is not None
    assert "ranks 0 and 2 share a GPU" in why


def test_they_do_where_it_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert _asked_by_the_last(["GPU-a", "GPU-a"]) is None


def test_one_worker_staging_reason_keeps_all_from_it() -> None:
    why = _asked_by_the_last(["", "GPU-b"])
    assert why is not None
    assert "rank 0 has no collectives" in why


class Group:
    """Of the accelerator's library, and its stream: what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.asked.append(name)


@pytest.mark.parametrize(("lost_peer", "asked"), [(False, ["synchronize", "shutdown"]), (True, ["abort"])])
def test_groups_are_shut_down_after_a_good_end_and_aborted_after_a_loss(lost_peer: bool, asked: list[str]) -> None:
    links = Links(None, HashStore(), 0, 1)
    links._group = links._stream = group = Group()
    links.close(lost_peer)
    assert group.asked == asked
    assert links._group is None


def test_all_groups_have_hvds_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(accelerator, "identity", lambda device: "GPU-a")
    monkeypatch.setattr(accelerator, "has_collectives", lambda kind: True)
    monkeypatch.setattr(accelerator, "new_stream", lambda device, urgent: None)
    monkeypatch.setattr(accelerator, "use", lambda device: called.append(device))
    monkeypatch.setattr(accelerator, "group", lambda *arguments: called.append(arguments))
    store = HashStore()
    store.set("device/1", "GPU-b")
    links = Links(object(), store, 0, 2)
    device = torch.device("cuda", 3)
    assert links.transfers(device) is links.transfers(device)
    first, (_, *arguments) = called
    assert first == device
    assert arguments == [0, 2, device, NO_TIMEOUT]
