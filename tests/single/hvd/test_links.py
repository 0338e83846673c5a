"""Which workers can use NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch.distributed import HashStore, is_nccl_available

from lockstep.hvd.links import without_nccl

needs_nccl = pytest.mark.skipif(not is_nccl_available(), reason="this torch has no NCCL")


def _asked_by_the_last(gpus: Sequence[str]) -> str | None:
    store = HashStore()
    for rank, gpu in enumerate(gpus):
        store.set(f"gpu/{rank}", gpu)
    return without_nccl(store, len(gpus) - 1, len(gpus), gpus[-1])


@needs_nccl
def test_workers_with_a_gpu_each_use_nccl() -> None:
    assert _asked_by_the_last(["GPU-a", "GPU-b", "GPU-c"]) is None


@needs_nccl
def test_workers_that_share_a_gpu_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    why = _asked_by_the_last(["GPU-a", "GPU-b", "GPU-a"])
    assert why is not None
    assert "ranks 0 and 2 share a GPU" in why


@needs_nccl
def test_they_do_where_it_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert _asked_by_the_last(["GPU-a", "GPU-a"]) is None


def test_one_worker_without_nccl_keeps_all_from_it() -> None:
    why = _asked_by_the_last(["", "GPU-b"])
    assert why is not None
    assert "rank 0 has no NCCL" in why
