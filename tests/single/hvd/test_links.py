"""Which workers can use NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch.distributed import HashStore

from lockstep.hvd.links import staging_reason


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
