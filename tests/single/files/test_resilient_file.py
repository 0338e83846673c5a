"""A file of lines over a full disk, a removed folder, and a fork."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.files import resilient_file
from lockstep.files.resilient_file import PatientFile


@contextmanager
def _largest_file(size_bytes: int) -> Iterator[None]:
    """Let the system refuse what is larger, as it does on a full disk; a part of a line still fits."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _lines(count: int) -> str:
    return "".join(f"line {number}\n" for number in range(count))


def test_each_line_is_there_once_when_there_is_room_again(tmp_path: Path) -> None:
    path, told = tmp_path / "lines", list[str]()
    file = PatientFile(path, told.append)
    with _largest_file(10):
        for number in range(5):  # the second is cut in the middle
            file.write(f"line {number}")
    assert path.read_text() == "line 0\nlin"
    file.write("line 5")
    file.close()
    assert path.read_text() == _lines(6)
    assert [line.partition(";")[0] for line in told] == [
        f"{path} cannot be written: File too large",
        f"{path} is written again, with all lines",
    ]


def test_what_is_too_much_to_keep_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resilient_file, "MOST_BYTES", 20)
    told: list[str] = []
    file = PatientFile(tmp_path / "lines", told.append)
    with _largest_file(0):
        for number in range(5):
            file.write(f"line {number}")
        assert file.flush() == f"{tmp_path / 'lines'} cannot be written: File too large"
    file.write("line 5")
    file.write("line 6")
    file.close()
    assert (tmp_path / "lines").read_text() == _lines(3) + "line 5\nline 6\n"
    assert told[-1] == f"{tmp_path / 'lines'} is written again; 2 lines were too many to keep"


def test_a_removed_file_is_made_again_with_all_that_it_held(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = PatientFile(tmp_path / "run" / "lines", lambda line: None)
    file.write("line 0")
    shutil.rmtree(tmp_path / "run")
    file.write("line 1")
    file.close()
    assert (tmp_path / "run" / "lines").read_text() == _lines(2)


def test_a_forked_process_leaves_what_is_kept_to_its_parent(tmp_path: Path) -> None:
    file = PatientFile(tmp_path / "lines", lambda line: None)
    with _largest_file(0):
        file.write("line 0")
    child = os.fork()
    if not child:
        file.write("from the child")
        os._exit(0)
    os.waitpid(child, 0)
    file.close()
    assert (tmp_path / "lines").read_text() == "from the child\nline 0\n"
