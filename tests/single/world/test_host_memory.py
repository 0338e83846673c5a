"""Memory that a CPU's tensors have freed stays in the process, except in loader processes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import train_digits

from lockstep.world.host_memory import MALLOC_VARIABLES, keep_freed_memory, return_freed_memory
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

CPU = torch.device("cpu")
BLOCK_BYTES = 1 << 30  # more than any free block that an earlier test may have left; never written to

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2") or any(name in os.environ for name in MALLOC_VARIABLES),
    reason="the C library is not glibc 2.33 or later, or its malloc is configured",
)


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def _heap_and_mapped_bytes() -> tuple[int, int]:
    """Return the size of malloc's heaps, with what is free there, and of the blocks that it has mapped separately."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return info.arena, info.hblkhd


def _is_kept(size_bytes: int = 2 * BLOCK_BYTES) -> bool:
    """Return whether the memory of a large block stays in the heap after it is freed."""
    _, mapped = _heap_and_mapped_bytes()
    block = torch.empty(size_bytes, dtype=torch.uint8)
    heap, mapped_with_block = _heap_and_mapped_bytes()
    is_mapped = mapped_with_block - mapped >= size_bytes
    del block
    is_kept = not is_mapped and _heap_and_mapped_bytes()[0] >= heap
    assert is_mapped != is_kept
    return is_kept


@pytest.fixture(autouse=True)
def usual_settings() -> Iterator[None]:
    """Start and end with freed memory returned: an earlier job may have kept it in this process."""
    return_freed_memory()
    yield
    return_freed_memory()


@needs_glibc
def test_freed_block_is_kept_until_memory_is_returned() -> None:
    assert not _is_kept()
    keep_freed_memory(CPU)
    assert _is_kept(BLOCK_BYTES)  # which may then be a free block of the heap, too small for the next line
    return_freed_memory()
    assert not _is_kept()


@needs_glibc
def test_users_settings_and_jobs_on_a_device_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_freed_memory(torch.device("cuda"))
    assert not _is_kept()
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    keep_freed_memory(CPU)
    assert not _is_kept()


def test_another_c_library_is_left_alone() -> None:
    keep_freed_memory(CPU, SimpleNamespace())


@needs_glibc
def test_job_on_a_cpu_keeps_its_memory(tmp_path: Path) -> None:
    train_digits(World(RankInfo(), CPU), "plain", 64, 64, {"epochs": 1, "device": "cpu", "run_dir": tmp_path / "run"})
    assert _is_kept()
