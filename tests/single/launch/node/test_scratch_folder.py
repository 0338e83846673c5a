"""The scratch folders of jobs: removed with the job, or by the next one if everything was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lockstep.launch.node import scratch_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def _killed_with_a_scratch_folder() -> None:
    pid = os.fork()
    if not pid:
        (scratch_folder.make_scratch() / "file").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def test_the_folders_of_killed_jobs_are_removed_and_no_others(temporary: Path) -> None:
    own = scratch_folder.make_scratch()
    _killed_with_a_scratch_folder()
    (temporary / f"{scratch_folder.PREFIX}unlocked").mkdir()  # being created, or on a file system without locks
    (temporary / "lockstep-0").mkdir()
    assert len(list(temporary.iterdir())) == 4
    scratch_folder.remove_abandoned()
    assert {each.name for each in temporary.iterdir()} == {own.name, f"{scratch_folder.PREFIX}unlocked", "lockstep-0"}


def test_a_folder_belongs_to_the_forked_children_too(temporary: Path) -> None:
    reading, writing = os.pipe()
    parent = os.fork()
    if not parent:
        scratch_folder.make_scratch()
        if not os.fork():
            os.close(writing)
            os.read(reading, 1)
        os._exit(0)
    os.waitpid(parent, 0)
    scratch_folder.remove_abandoned()
    assert len(list(temporary.iterdir())) == 1
    os.write(writing, b"x")
    os.close(reading)
    os.close(writing)


def test_the_folder_in_memory_goes_with_it(temporary: Path) -> None:
    memory = temporary / "memory"
    memory.mkdir()
    (memory / "owner").write_text("999999999")
    folder = scratch_folder.make_scratch()
    scratch_folder.note_snapshots(folder, str(memory))
    scratch_folder.remove_scratch(folder)
    assert not list(temporary.iterdir())
