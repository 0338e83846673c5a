"""Memory that a CPU's tensors have freed stays in the process while a job runs, and goes back to the system then."""

from __future__ import annotations

import ctypes
import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
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
BLOCK_BYTES = 64 << 20  # glibc maps blocks of more than 32 MiB separately, unless it is told not to

KEEP = [(TRIM_THRESHOLD, NEVER), (MMAP_MAX, 0)]
RETURN = [*USUAL.items(), (0,)]

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim") or any(name in os.environ for name in MALLOC_VARIABLES),
    reason="the C library is not glibc, or its malloc is configured",
)


def _bytes_kept() -> int:
    """Return how much of a block that is written and freed stays in the process."""
    block = torch.ones(BLOCK_BYTES, dtype=torch.uint8)
    held = psutil.Process().memory_info().rss
    del block
    return BLOCK_BYTES - (held - psutil.Process().memory_info().rss)


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


def test_a_job_keeps_its_memory_to_its_end(
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
