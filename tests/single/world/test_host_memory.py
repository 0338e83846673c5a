"""Memory that a CPU's tensors have freed stays in the process while a job runs, and goes back to the system then."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace

import psutil
import pytest
import torch
from runs import NETS, small_digits

from lockstep.train.fit import configure
from lockstep.train.setup import build_job
from lockstep.world import host_memory
from lockstep.world.host_memory import MMAP_MAX, NEVER, TRIM_THRESHOLD, USUAL, freed_memory_kept
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

CPU = torch.device("cpu")
BLOCK_BYTES = 64 << 20  # glibc maps blocks of more than 32 MiB separately, unless it is told not to

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")


def _bytes_kept() -> int:
    """Return how much of a block that is written and freed stays in the process."""
    block = torch.ones(BLOCK_BYTES, dtype=torch.uint8)
    held = psutil.Process().memory_info().rss
    del block
    return BLOCK_BYTES - (held - psutil.Process().memory_info().rss)


@pytest.fixture(autouse=True)
def usual_settings() -> None:
    """Undo what a job that another test did not close has set."""
    host_memory.return_freed_memory(CPU)


@needs_glibc
def test_a_freed_block_is_kept_in_the_context_only() -> None:
    assert _bytes_kept() < BLOCK_BYTES / 4
    with freed_memory_kept(CPU):
        assert _bytes_kept() > BLOCK_BYTES * 3 / 4
        inside = psutil.Process().memory_info().rss
    assert inside - psutil.Process().memory_info().rss > BLOCK_BYTES * 3 / 4
    assert _bytes_kept() < BLOCK_BYTES / 4


@needs_glibc
def test_the_users_settings_and_jobs_on_a_device_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with freed_memory_kept(torch.device("cuda")):
        assert _bytes_kept() < BLOCK_BYTES / 4
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    with freed_memory_kept(CPU):
        assert _bytes_kept() < BLOCK_BYTES / 4


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with freed_memory_kept(CPU):
        pass


def test_a_job_keeps_its_memory_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def recorder(*names: str) -> dict[str, Callable[..., None]]:
        return {name: lambda *values: calls.append(values) for name in names}

    libc = SimpleNamespace(**recorder("mallopt", "malloc_trim"))
    monkeypatch.setattr(host_memory, "_glibc_for", lambda device: libc)
    job = build_job(configure(device="cpu", track=()), World(RankInfo(), CPU), small_digits(64, 64), NETS["plain"]())
    with closing(job):
        assert calls == [(TRIM_THRESHOLD, NEVER), (MMAP_MAX, 0)]
    assert calls[2:] == [*USUAL.items(), (0,)]
