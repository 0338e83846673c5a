"""Memory that a CPU's tensors have freed stays in the process while a job runs, and goes back to the system then."""

from __future__ import annotations

import ctypes
import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import train_digits

from lockstep.errors import ConfigError
from lockstep.world import host_memory
from lockstep.world.host_memory import (
    MALLOC_VARIABLES,
    MMAP_MAX,
    NEVER,
    TRIM_THRESHOLD,
    USUAL,
    freed_memory_kept,
    return_in_child,
)
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

CPU = torch.device("cpu")
BLOCK_BYTES = 1 << 30  # more than any free block that an earlier test may have left; never written to

KEEP = [(TRIM_THRESHOLD, NEVER), (MMAP_MAX, 0)]
RETURN = [*USUAL.items(), (0,)]

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
    heap, mapped = _heap_and_mapped_bytes()
    block = torch.empty(size_bytes, dtype=torch.uint8)
    is_mapped = _heap_and_mapped_bytes()[1] - mapped >= size_bytes
    del block
    is_kept = _heap_and_mapped_bytes()[0] - heap >= size_bytes // 2  # the rest may have been free before
    assert is_mapped != is_kept
    return is_kept


@needs_glibc
def test_a_freed_block_is_kept_in_the_context_only() -> None:
    assert not _is_kept()
    with freed_memory_kept(CPU):
        assert _is_kept(BLOCK_BYTES)  # which may then be a free block of the heap, too small for the next line
    assert not _is_kept()


@needs_glibc
def test_the_users_settings_and_jobs_on_a_device_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with freed_memory_kept(torch.device("cuda")):
        assert not _is_kept()
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    with freed_memory_kept(CPU):
        assert not _is_kept()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with freed_memory_kept(CPU):
        pass


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the arguments of malloc's functions, which are not called."""
    seen: list[tuple[int, ...]] = []
    libc = SimpleNamespace(mallopt=lambda *values: seen.append(values), malloc_trim=lambda *values: seen.append(values))
    monkeypatch.setattr(host_memory, "_glibc", lambda: libc)
    return seen


def test_a_job_within_another_leaves_the_settings_to_it(calls: list[tuple[int, ...]]) -> None:
    with freed_memory_kept(CPU):
        with freed_memory_kept(CPU):
            pass
        assert calls == KEEP * 2
    assert calls == [*KEEP * 2, *RETURN]


def test_a_loader_process_returns_its_memory(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    return_in_child()
    assert calls == []
    monkeypatch.setattr(host_memory, "_depth", 1)  # forked within a job
    return_in_child()
    assert calls == RETURN


def test_job_keeps_its_memory_until_it_exits(
    calls: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_training: list[list[tuple[int, ...]]] = []
    run = importlib.import_module("lockstep.train.run")  # the package has a function of this name
    train = run.train

    def seen(job: Any) -> Any:
        at_training.append(calls.copy())
        return train(job)

    monkeypatch.setattr(run, "train", seen)
    world = World(RankInfo(), CPU)
    train_digits(world, "plain", 64, 64, {"epochs": 1, "device": "cpu", "run_dir": tmp_path / "run"})
    assert at_training == [KEEP]
    assert calls == [*KEEP, *RETURN]


def test_a_job_that_cannot_start_leaves_the_usual_settings(calls: list[tuple[int, ...]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        train_digits(World(RankInfo(), CPU), "plain", 64, 64, {"run_dir": tmp_path / "run", "start_epoch": 99})
    assert calls == [*KEEP, *RETURN]
