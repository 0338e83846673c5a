"""Loader processes by themselves: they serve one loader after another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep.data import loader_processes
from lockstep.data.loader_processes import LoaderProcesses, begin_loader, keep_processes

# What torch and newer Pythons say of any loader process on a small machine, or beside another thread.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
COUNT = 2


@dataclass(frozen=True)
class _Wanted:
    samples: list[int]


class _Source:
    """Returns what is requested, slowly if told so, and notes in a folder what it has started."""

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        self._folder, self._seconds = folder, seconds

    def __getitems__(self, request: _Wanted) -> Any:
        (self._folder / str(request.samples[0])).touch()
        time.sleep(self._seconds)
        return request.samples


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    while loader_processes._kept:
        loader_processes._kept.pop().close()
    loader_processes._started.clear()


def _processes(source: _Source, key: Any, count: int = COUNT) -> LoaderProcesses:
    return LoaderProcesses(source, key, begin_loader, num_workers=count, persistent_workers=True)


def _requests(*numbers: int) -> Iterator[_Wanted]:
    return (_Wanted([number]) for number in numbers)


def _living() -> set[int]:
    return {each.pid for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE}


def test_kept_processes_serve_the_next_loader_alike(tmp_path: Path) -> None:
    before, source = _living(), _Source(tmp_path)
    first = _processes(source, "alike")
    assert next(first.start(_requests(*range(20)))) == [0]
    kept = _living() - before
    assert len(kept) == COUNT
    keep_processes()
    first.close()
    second = _processes(source, "alike")
    assert list(second.start(_requests(30, 31, 32))) == [[30], [31], [32]]
    keep_processes()  # at a second loss
    third = _processes(source, "alike")
    assert list(third.start(_requests(40))) == [[40]]
    assert _living() - before == kept
    third.close()
    assert not _living() - before


@pytest.mark.parametrize(("key", "other"), [("one", "other"), (None, None)])
def test_loaders_that_differ_start_processes_of_their_own(tmp_path: Path, key: Any, other: Any) -> None:
    before, source = _living(), _Source(tmp_path)
    first = _processes(source, key)
    assert next(first.start(_requests(0, 1))) == [0]
    old = _living() - before
    keep_processes()
    second = _processes(source, other)
    assert list(second.start(_requests(5))) == [[5]]
    assert not old & _living() or key is None  # kept ones are ended; others are their loader's
    assert len(_living() - before - old) == COUNT
    second.close()
    first.close()


def test_batches_of_a_pass_that_was_left_are_not_started(tmp_path: Path) -> None:
    processes = _processes(_Source(tmp_path, seconds=1.0), None, count=1)
    processes.start(_requests(*range(10)))  # two of them are sent at once
    while not (tmp_path / "0").exists():
        time.sleep(0.01)
    assert next(processes.start(_requests(20))) == [20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "20"]
    processes.close()


def test_processes_are_not_kept_beside_another_process_group(tmp_path: Path) -> None:
    """Their copies of its connections would stay open when this worker leaves it."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        before = _living()
        first = _processes(_Source(tmp_path), "alike")
        assert next(first.start(_requests(0, 1))) == [0]
        keep_processes()
        first.close()
        assert not _living() - before
    finally:
        torch.distributed.destroy_process_group()
