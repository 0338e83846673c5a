"""A file is there whole, or as it was before."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from lockstep.files.atomic import partial_of, replacing, sync


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_takes_the_place_of_the_one_before(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "weights.pt2"
    path.write_text("before")
    with replacing(path, durable=durable) as partial:
        assert partial.suffix == ".pt2"
        partial.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_after_an_error_all_is_as_it_was(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def write() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_kill_has_left_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    partial_of(path).write_text("a longer text of before")
    with replacing(path) as partial:
        partial.write_text("new")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"file": "new"}


def test_a_shared_file_is_written_beside_that_of_another_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path, shared=True) as partial:
        assert str(os.getpid()) in partial.name
        partial_of(path).write_text("another's")
        partial.write_text("own")
    assert path.read_text() == "own"


def test_folder_removed_during_the_write_hides_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def write() -> None:
        with replacing(folder / "file"):
            folder.rmdir()
            raise ValueError("the first error")

    with pytest.raises(ValueError, match="first"):
        write()


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.EINVAL, nullcontext()), (errno.ENOTSUP, nullcontext()), (errno.EIO, pytest.raises(OSError, match="I/O"))],
)
def test_file_system_that_cannot_sync_folders_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: AbstractContextManager[Any]
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, "I/O")

    monkeypatch.setattr(os, "fsync", refuse)
    with outcome:
        sync(tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_existing_temporary_name_is_not_followed_or_waited_for(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    partial = partial_of(tmp_path / "config")
    if kind == "link":
        partial.symlink_to(other)
    else:
        os.mkfifo(partial)
    with replacing(tmp_path / "config") as path:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
        os.write(descriptor, b"new")
        os.close(descriptor)
    assert (tmp_path / "config").read_text() == "new"
    assert other.read_text() == "mine"
