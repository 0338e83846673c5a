"""The scratch folders of jobs: removed with the job, or by the next one if everything was killed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from lockstep.launch.node import job_folders


@pytest.fixture(autouse=True)
def temporary(temporary_files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(job_folders, "MEMORY", temporary_files)
    return temporary_files


def _killed_with_a_scratch_folder() -> None:
    pid = os.fork()
    if not pid:
        (job_folders.make_scratch() / "file").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def test_the_folders_of_killed_jobs_are_removed_and_no_others(temporary: Path) -> None:
    own = job_folders.make_scratch()
    _killed_with_a_scratch_folder()
    (temporary / f"{job_folders.PREFIX}unlocked").mkdir()  # being created, or on a file system without locks
    (temporary / "lockstep-0").mkdir()
    assert len(list(temporary.iterdir())) == 4
    job_folders.remove_abandoned()
    assert {each.name for each in temporary.iterdir()} == {own.name, f"{job_folders.PREFIX}unlocked", "lockstep-0"}


def test_a_folder_belongs_to_the_forked_children_too(temporary: Path) -> None:
    reading, writing = os.pipe()
    parent = os.fork()
    if not parent:
        job_folders.make_scratch()
        if not os.fork():
            os.close(writing)
            os.read(reading, 1)
        os._exit(0)
    os.waitpid(parent, 0)
    job_folders.remove_abandoned()
    assert len(list(temporary.iterdir())) == 1
    os.write(writing, b"x")
    os.close(reading)
    os.close(writing)


def test_snapshots_are_removed_by_the_newest_owner_only(temporary: Path) -> None:
    memory, before, now = temporary / "memory", job_folders.make_scratch(), job_folders.make_scratch()
    job_folders.own_snapshots(before, memory, discard=False)
    (memory / "step").touch()
    job_folders.own_snapshots(now, memory, discard=False)
    job_folders.remove_scratch(before)
    assert (memory / "step").exists()
    job_folders.own_snapshots(now, memory, discard=True)
    assert not (memory / "step").exists()
    job_folders.remove_scratch(now)
    assert not list(temporary.iterdir())


def test_only_old_snapshots_of_a_deleted_folder_are_removed(temporary: Path) -> None:
    scratch, gone = job_folders.make_scratch(), temporary / "gone"
    gone.mkdir()
    memory = {name: temporary / f"{job_folders.SNAPSHOTS_PREFIX}{name}" for name in ("used", "new", "old")}
    for name, folder in memory.items():
        job_folders.own_snapshots(scratch if name == "used" else gone, folder, discard=False)
        if name != "new":
            os.utime(folder, (1, 1))
    shutil.rmtree(gone)  # by a batch system that has killed the job
    job_folders.remove_abandoned()
    assert [name for name, folder in memory.items() if folder.exists()] == ["used", "new"]


def test_next_job_completes_an_interrupted_removal(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, memory = job_folders.make_scratch(), temporary / f"{job_folders.SNAPSHOTS_PREFIX}state"
    job_folders.own_snapshots(scratch, memory, discard=False)
    for folder in (scratch, memory):
        (folder / "file").touch()

    def remove_a_part(path: Path, ignore_errors: bool) -> None:
        for name in (job_folders.LOCK, job_folders.OWNER):
            (path / name).unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_a_part)
        job_folders.remove_scratch(scratch)
    assert len(list(temporary.rglob("file"))) == 2
    job_folders.remove_abandoned()
    assert not list(temporary.iterdir())


def test_semaphores_of_the_job_are_removed_and_no_others(temporary: Path) -> None:
    scratch, other = job_folders.make_scratch(), job_folders.make_scratch()
    for folder in (scratch, other):
        (temporary / f"sem.{folder.name}-abcdefgh").touch()
    (temporary / "sem.mp-abcdefgh").touch()
    job_folders.remove_scratch(scratch)
    assert {each.name for each in temporary.glob("sem.*")} == {f"sem.{other.name}-abcdefgh", "sem.mp-abcdefgh"}
