"""Process groups of the workers that a program starts itself."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from lockstep import hvd
from lockstep.diagnosis import publisher, spawned_workers
from lockstep.diagnosis.board import JOINING, MET, Board
from lockstep.errors import ConfigError
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import connect

Meet = Callable[..., Iterator[Any]]
PARENT = 12345


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    own |= {"HOROVOD_RANK": rank, "HOROVOD_SIZE": size, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
    return {"TORCHELASTIC_USE_AGENT_STORE": "True", **{name: str(value) for name, value in own.items()}}


@pytest.fixture
def seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Whether torch takes each address that is met at for the launcher's, in a child of the worker 1 of 2."""
    found: list[str] = []

    def rendezvous(url: str, rank: int, world_size: int, **named: Any) -> Iterator[Any]:
        found.append(os.environ["TORCHELASTIC_USE_AGENT_STORE"])
        yield "store", rank, world_size

    parent = getattr(request, "param", SimpleNamespace(pid=PARENT))
    changes: list[tuple[Any, str, Any]] = [
        (distributed_c10d, "rendezvous", rendezvous),
        (multiprocessing, "parent_process", lambda: parent),
    ]
    for module, name, function in changes:
        monkeypatch.setattr(module, name, function)
    (tmp_path / "boards").mkdir()
    variables = {"LOCKSTEP_PROGRESS": tmp_path / "boards", "TORCHELASTIC_ERROR_FILE": tmp_path / "error.json"}
    for name, value in {**_variables(1, 2, 4000), **variables}.items():
        monkeypatch.setenv(name, str(value))
    spawned_workers.allow_groups(lambda: found.append("measured"))
    return found


@pytest.mark.parametrize(
    ("url", "port", "is_launchers"),
    [
        ("env://", "4000", True),
        ("env://", "29500", False),
        ("tcp://127.0.0.1:29500", "4000", False),
        ("tcp://127.0.0.1:4000", "29500", True),
        ("file:///somewhere", "4000", True),
    ],
)
def test_only_the_launchers_address_has_its_store(
    url: str, port: str, is_launchers: bool, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    assert next(distributed_c10d.rendezvous(url, 1, 2)) == ("store", 1, 2)
    assert seen == ["True" if is_launchers else ""]
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_the_store_of_another_launcher_is_left_to_it(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/of-torchrun/error.json")
    next(distributed_c10d.rendezvous("tcp://127.0.0.1:29500", 1, 2))
    assert seen == ["True"]
    before = distributed_c10d.rendezvous
    spawned_workers.allow_groups(lambda: None)
    assert distributed_c10d.rendezvous is before


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    """The board of the worker that has started this process."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: PARENT)
        return Board(tmp_path / "boards", 1)


def test_workers_that_all_start_workers_are_refused(seen: list[str], board: Board, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the script starts its own workers: start it with python, or with -np 1"):
        next(distributed_c10d.rendezvous("env://", 0, 2))
    error = json.loads((tmp_path / "error.json").read_text())["lockstep"]
    assert (error["text"].partition(":")[0], error["exit_code"], error["final"]) == ("worker 1", 2, True)
    assert seen == []


def test_groups_beside_the_job_are_allowed(seen: list[str], board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    next(distributed_c10d.rendezvous("env://", 1, 2))  # the child is the worker itself
    next(distributed_c10d.rendezvous("env://"))
    board.set_flag(JOINING)
    board.set_flag(JOINING, False)
    next(distributed_c10d.rendezvous("env://", 0, 2))  # the worker takes part in the job
    monkeypatch.setenv("HOROVOD_SIZE", "1")
    next(distributed_c10d.rendezvous("env://", 0, 3))
    assert len(seen) == 4


def _run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a loader process that was not forked, before it has run the script again."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)


def test_a_script_that_is_run_again_joins_no_group(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _run_again(monkeypatch)
    with pytest.raises(ConfigError, match="runs the script again"):
        next(distributed_c10d.rendezvous("env://"))
    next(distributed_c10d.rendezvous("tcp://127.0.0.1:29500", 0, 1))
    assert seen == [""]


@pytest.mark.parametrize("size", [1, 2])
def test_a_script_that_is_run_again_does_not_connect(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 4000}.items():
        monkeypatch.setenv(name, str(value))
    _run_again(monkeypatch)
    for connected in (connect(RankInfo.from_environment(), "cpu"), _hvd()):
        with nullcontext() if size == 1 else pytest.raises(ConfigError, match="runs the script again"), connected:
            pass


@contextmanager
def _hvd() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_a_group_of_one_is_allowed_before_the_job_starts(seen: list[str], board: Board) -> None:
    next(distributed_c10d.rendezvous("tcp://127.0.0.1:29500", 0, 1))
    assert seen == [""]


@pytest.mark.parametrize("name", ["TORCHELASTIC_USE_AGENT_STORE", "HOROVOD_RANK", "HOROVOD_SIZE", "LOCKSTEP_PROGRESS"])
def test_scripts_may_remove_the_launchers_variables(
    name: str, seen: list[str], board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name)
    assert next(distributed_c10d.rendezvous("tcp://127.0.0.1:29500", 1, 2)) == ("store", 1, 2)
    assert seen == [""]


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("seen", [None], indirect=True)  # in the worker itself
def test_a_port_set_before_the_import_of_torch_has_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    before = distributed_c10d.rendezvous
    spawned_workers.allow_groups(lambda: None)
    assert distributed_c10d.rendezvous is not before


def test_a_grandchild_is_not_refused(seen: list[str]) -> None:
    next(distributed_c10d.rendezvous("env://", 0, 2))
    assert seen == ["True"]


def test_a_study_measures_a_started_worker_under_its_own_rank(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "1")
    monkeypatch.setenv("LOCKSTEP_MEASURE_SPAWNED", "5,30,1,")
    try:
        next(distributed_c10d.rendezvous("tcp://127.0.0.1:29500", 2, 3))
        board = publisher.own_board()
        assert board
        assert board.reader().rank == 2
        assert board.reader().read().flags & MET
    finally:
        publisher.stop()
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCKSTEP_MEASURE")
    assert [os.environ.pop(name) for name in names] == ["2", "3", "3", "5,30,1,"]
    assert "LOCKSTEP_MEASURE_SPAWNED" not in os.environ
    assert seen == ["", "measured"]
