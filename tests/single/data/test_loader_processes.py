"""Loader processes by themselves."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.data.loader_processes import LoaderProcesses, begin_loader, start_method

# What torch says of any loader process on a small machine.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


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


def _requests(*numbers: int) -> Iterator[_Wanted]:
    return (_Wanted([number]) for number in numbers)


def test_batches_of_a_pass_that_was_left_are_not_started(tmp_path: Path) -> None:
    source = _Source(tmp_path)
    processes = LoaderProcesses(source, begin_loader, num_workers=1, persistent_workers=True)
    source.number = processes._current.number
    processes.start(_requests(*range(10)))  # two of them are sent at once
    while not (tmp_path / "0").exists():
        time.sleep(0.01)
    assert next(processes.start(_requests(20))) == [20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "20"]
    processes.close()


class _Unpicklable(_Source):
    def __getstate__(self) -> Any:
        raise FileNotFoundError(2, "No such file", "train.h5")


def test_error_of_the_data_set_at_the_start_is_the_users(tmp_path: Path) -> None:
    source = _Unpicklable(tmp_path)
    processes = LoaderProcesses(source, begin_loader, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(FileNotFoundError, match=r"train\.h5"):
        processes.start(_requests(0))


@pytest.mark.skipif(sys.platform != "linux", reason="forking is the default of Linux")
@pytest.mark.parametrize(
    ("version", "given", "method"),
    [
        ((3, 13), None, "fork"),
        ((3, 13), "forkserver", None),
        ((3, 14), "forkserver", "fork"),
        ((3, 14), "spawn", None),
    ],
)
def test_loaders_fork_unless_the_program_has_chosen(
    version: tuple[int, int], given: str | None, method: str | None
) -> None:
    assert start_method(given, version) == method
