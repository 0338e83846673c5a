"""A file of lines over a full disk, a removed folder, and a fork."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest
from disks import largest_file

from lockstep.errors import LockstepError
from lockstep.files.atomic import replacing
from lockstep.files.resilient_file import ResilientFile


def _lines(count: int) -> str:
    return "".join(f"line {number}\n" for number in range(count))


def test_each_line_is_there_once_when_there_is_room_again(tmp_path: Path) -> None:
    path, told = tmp_path / "lines", list[str]()
    file = ResilientFile(path, told.append)
    with largest_file(10):
        for number in range(5):  # the second is cut in the middle
            file.write(f"line {number}")
    assert path.read_text() == "line 0\nlin"
    file.write("line 5")
    file.close()
    assert path.read_text() == _lines(6)
    assert [line.partition(";")[0] for line in told] == [
        f"{path} cannot be written: File too large",
        f"{path} is writable again",
    ]


def test_what_is_too_much_to_keep_is_counted(tmp_path: Path) -> None:
    told: list[str] = []
    file = ResilientFile(tmp_path / "lines", told.append)
    file.max_bytes = 20
    with largest_file(0):
        for number in range(5):
            file.write(f"line {number}")
        assert file.flush() == f"{tmp_path / 'lines'} cannot be written: File too large"
    file.write("line 5")
    file.write("line 6")
    file.close()
    assert (tmp_path / "lines").read_text() == _lines(3) + "line 5\nline 6\n"
    assert told[-1] == f"{tmp_path / 'lines'} is writable again; 2 lines did not fit in memory and are lost"


def test_a_removed_file_is_made_again_with_all_that_it_held(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = ResilientFile(tmp_path / "run" / "lines", lambda line: None)
    file.write("line 0")
    shutil.rmtree(tmp_path / "run")
    file.write("line 1")
    file.close()
    assert (tmp_path / "run" / "lines").read_text() == _lines(2)


def test_file_in_a_renamed_folder_is_rewritten_at_its_old_path(tmp_path: Path) -> None:
    """As where a mount goes away: the open file still takes lines, but they cannot be found."""
    told, opened = list[str](), psutil.Process().num_fds()
    (tmp_path / "run").mkdir()
    file = ResilientFile(tmp_path / "run" / "lines", told.append)
    file.write("line 0")
    (tmp_path / "run").rename(tmp_path / "moved")
    file.write("line 1")
    file.write("line 2")
    file.close()
    assert told == [f"{tmp_path}/run/lines was removed or renamed; recreated it with all its lines"]
    assert (tmp_path / "run" / "lines").read_text() == _lines(3)
    assert (tmp_path / "moved" / "lines").read_text() == _lines(1)
    assert psutil.Process().num_fds() == opened


def test_a_change_of_the_working_directory_moves_no_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "elsewhere").mkdir()
    file = ResilientFile(Path("lines"), lambda line: None)
    file.write("line 0")
    monkeypatch.chdir(here / "elsewhere")
    file.write("line 1")
    file.close()
    assert (here / "lines").read_text() == _lines(2)
    assert os.listdir(here / "elsewhere") == []


def test_file_whose_folder_is_taken_keeps_its_lines_in_memory(tmp_path: Path) -> None:
    run, told = tmp_path / "run", list[str]()
    run.mkdir()
    file = ResilientFile(run / "lines", told.append)
    file.write("line 0")
    run.rename(tmp_path / "moved")
    run.write_text("a file")
    file.write("line 1")
    assert [line.partition(";")[0] for line in told] == [f"{run / 'lines'} cannot be written: File exists"]
    run.unlink()
    file.close()
    assert (run / "lines").read_text() == _lines(2)


def test_the_file_of_a_job_that_took_over_is_not_written_to(tmp_path: Path) -> None:
    path, lost = tmp_path / "lines", LockstepError("the folder is now held by another job")

    def confirm() -> None:
        raise lost

    file = ResilientFile(path, lambda line: None, confirm)
    file.write("line 0")
    with replacing(path) as partial:  # as a job does that resumes
        partial.write_text("line 0\n")
    for write in (lambda: file.write("line 1"), file.close):
        with pytest.raises(LockstepError, match="now held by another job"):
            write()
    assert path.read_text() == _lines(1)


def test_a_job_that_takes_over_after_the_lock_was_asked_is_safe(tmp_path: Path) -> None:
    path = tmp_path / "lines"

    def confirm() -> None:
        with replacing(path) as partial:
            partial.write_text("of another job\n")

    file = ResilientFile(path, lambda line: None, confirm)
    path.rename(tmp_path / "moved")
    path.touch()
    file.write("line 0")
    assert path.read_text() == "of another job\n"


def test_a_forked_process_leaves_what_is_kept_to_its_parent(tmp_path: Path) -> None:
    file = ResilientFile(tmp_path / "lines", lambda line: None)
    with largest_file(0):
        file.write("line 0")
    child = os.fork()
    if not child:
        file.write("from the child")
        os._exit(0)
    os.waitpid(child, 0)
    file.close()
    assert (tmp_path / "lines").read_text() == "from the child\nline 0\n"


def test_a_link_is_not_followed_and_a_pipe_not_filled(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "link").symlink_to(other)
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("link", "symbolic link"), ("pipe", "it is not a regular file")):
        with pytest.raises(OSError, match=words):
            ResilientFile(tmp_path / name, lambda line: None)
    assert other.read_text() == "mine"
