"""Loader processes by themselves: they serve one loader after another."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep.data import loader_processes
from lockstep.data.loader_processes import Kind, LoaderProcesses, begin_loader, keep_processes
from lockstep.world.generations import connections, while_waiting

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
    """Returns what is requested, and notes in a folder what it has started.

    Attributes:
        number: In shared memory; no batch is made before it is 2, such as the pass's.
    """

    number: torch.Tensor | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitems__(self, request: _Wanted) -> Any:
        (self._folder / str(request.samples[0])).touch()
        while self.number is not None and self.number.item() < 2:
            time.sleep(0.01)
        return request.samples


@pytest.fixture(autouse=True)
def _world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this process alone, whose connections are known; no processes are left."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(connections, "_known", {-1: 0})
    yield
    for kept in loader_processes._kept:
        kept.batches.end()
    loader_processes._kept.clear()
    loader_processes._started.clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _processes(source: _Source, settings: object = None, count: int = COUNT, is_kept: bool = True) -> LoaderProcesses:
    kind = Kind((source, None), settings) if is_kept else None
    return LoaderProcesses(source, begin_loader, kind, num_workers=count, persistent_workers=True)


def _requests(*numbers: int) -> Iterator[_Wanted]:
    return (_Wanted([number]) for number in numbers)


def _living() -> set[int]:
    return {each.pid for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE}


def test_kept_processes_serve_the_next_loader_alike(tmp_path: Path) -> None:
    before, source = _living(), _Source(tmp_path)
    first = _processes(source)
    assert next(first.start(_requests(*range(20)))) == [0]
    kept = _living() - before
    assert len(kept) == COUNT
    keep_processes()
    second = _processes(source)
    assert list(second.start(_requests(30, 31, 32))) == [[30], [31], [32]]
    first.close()  # only now
    keep_processes()  # at a second loss
    assert list(second.start(_requests(35))) == [[35]]  # also the loader that had them
    keep_processes()
    third = _processes(source)
    assert list(third.start(_requests(40))) == [[40]]
    assert _living() - before == kept
    third.close()
    assert not _living() - before
    assert list(third.start(_requests(50))) == [[50]]
    third.close()


@pytest.mark.parametrize("other", ["settings", "source", "rank", "own processes"])
def test_loaders_that_differ_start_processes_of_their_own(
    tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, source = _living(), _Source(tmp_path)
    first = _processes(source, is_kept=other != "own processes")
    assert next(first.start(_requests(0, 1))) == [0]
    old = _living() - before
    keep_processes()
    if other == "rank":
        monkeypatch.setenv("RANK", "7")
    second = _processes(_Source(tmp_path) if other == "source" else source, 5 if other == "settings" else None)
    assert list(second.start(_requests(5))) == [[5]]
    assert len(_living() - before - old) == COUNT
    # Those of another source may be asked for later; others are superseded, or still the first loader's.
    assert (old <= _living()) == (other in ("source", "own processes"))
    second.close()
    first.close()


def test_two_loaders_of_one_data_set_keep_their_processes(tmp_path: Path) -> None:
    source, before = _Source(tmp_path), _living()
    for loader in (loaders := [_processes(source, settings) for settings in ("training", "evaluation")]):
        assert next(loader.start(_requests(0, 1))) == [0]
    kept = _living() - before
    keep_processes()
    for settings in ("evaluation", "training"):
        loaders.append(_processes(source, settings))
        assert list(loaders[-1].start(_requests(3))) == [[3]]
    assert _living() - before == kept
    for loader in loaders:
        loader.close()


def test_kept_processes_end_with_their_data_set(tmp_path: Path) -> None:
    before, source = _living(), _Source(tmp_path)
    gone = weakref.ref(source)
    first = _processes(source)
    assert next(first.start(_requests(0, 1))) == [0]
    keep_processes()
    del first, source
    for each in while_waiting:
        each()
    assert gone() is None
    assert not _living() - before


def _kill(process: Any) -> None:
    """End a loader process, and wait for torch's error, which a signal handler raises if no other has replaced it."""
    process.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        time.sleep(0.01)


def test_dead_processes_are_not_taken_over(tmp_path: Path) -> None:
    source = _Source(tmp_path)
    first = _processes(source)
    assert next(first.start(_requests(0, 1))) == [0]
    keep_processes()
    with suppress(RuntimeError):
        _kill(loader_processes._kept[0].batches.processes[0])
    second = _processes(source)
    assert list(second.start(_requests(7, 8))) == [[7], [8]]
    second.close()


@pytest.mark.parametrize("is_slow", [False, True])
def test_processes_answer_before_the_next_pass(tmp_path: Path, is_slow: bool) -> None:
    """Unless one of them has not completed its batch."""
    source = _Source(tmp_path)
    first = _processes(source, count=3)
    if is_slow:
        source.number = torch.zeros(1, dtype=torch.int64).share_memory_()
        first.start(_requests(*range(10)))
        while not (tmp_path / "0").exists():
            time.sleep(0.01)
        first._batches.leave()
        first._batches.take_answers(time.monotonic() + 0.2)
        assert first._batches._missing
        source.number[0] = 2
    else:
        assert next(first.start(_requests(*range(10)))) == [0]
        first._batches.leave()
        first._batches.take_answers(time.monotonic() + 60)
        assert first._batches._missing == 0
    first._batches.current.source = source
    assert list(first.start(_requests(*range(20, 30)))) == [[number] for number in range(20, 30)]
    assert list(first.start(_requests(40, 41))) == [[40], [41]]
    first.close()


def test_an_answer_that_fails_ends_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does if one of them has died: torch would wait for it for ever at the next pass."""
    source = _Source(tmp_path)
    first = _processes(source)
    assert next(first.start(_requests(*range(10)))) == [0]
    first._batches.leave()
    first._batches.current.source = source
    old = first._batches.processes
    monkeypatch.setattr(first._batches._loader._iterator, "_get_data", _fail)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        first.start(_requests(20))
    assert not any(process.is_alive() for process in old)
    assert list(first.start(_requests(30, 31))) == [[30], [31]]
    first.close()


def _fail() -> None:
    raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")


def test_batches_of_a_pass_that_was_left_are_not_started(tmp_path: Path) -> None:
    source = _Source(tmp_path)
    processes = _processes(source, count=1)
    source.number = processes._batches.current.number
    processes.start(_requests(*range(10)))  # two of them are sent at once
    while not (tmp_path / "0").exists():
        time.sleep(0.01)
    assert next(processes.start(_requests(20))) == [20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "20"]
    processes.close()


@pytest.mark.parametrize("groups", ["none", "two", "unknown"])
def test_processes_are_kept_only_with_the_one_known_group(
    tmp_path: Path, groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else their copies of its connections could stay open when this worker leaves it."""
    before = _living()
    first = _processes(_Source(tmp_path))
    assert next(first.start(_requests(0, 1))) == [0]
    if groups == "none":
        torch.distributed.destroy_process_group()
    elif groups == "two":
        torch.distributed.new_group([0])
    else:
        monkeypatch.setattr(connections, "_known", {})
    keep_processes()
    first.close()
    assert not _living() - before


def test_processes_are_kept_if_the_group_was_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of accelerators are: torch then knows no group any more."""
    monkeypatch.setattr(connections, "is_aborted", False)
    monkeypatch.setattr(connections, "abort", torch.distributed.destroy_process_group)
    first = _processes(_Source(tmp_path))
    assert next(first.start(_requests(0, 1))) == [0]
    connections.abort_after_loss()
    keep_processes()
    assert len(loader_processes._kept) == 1


@torch.inference_mode()
def test_pass_in_inference_mode_can_be_left(tmp_path: Path) -> None:
    first = _processes(_Source(tmp_path))
    assert next(first.start(_requests(0, 1))) == [0]
    with torch.inference_mode(False):
        keep_processes()
        assert len(loader_processes._kept) == 1


class _Unpicklable(_Source):
    def __getstate__(self) -> Any:
        raise FileNotFoundError(2, "No such file", "train.h5")


def test_error_of_the_data_set_at_the_start_is_the_users(tmp_path: Path) -> None:
    source = _Unpicklable(tmp_path)
    processes = LoaderProcesses(source, begin_loader, None, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(FileNotFoundError, match=r"train\.h5"):
        processes.start(_requests(0))
