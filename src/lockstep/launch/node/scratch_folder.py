"""The scratch folder of a job on one host, and those of jobs that were killed with all that cleans up after them.

Its lock is held by the processes that remove it. If nobody holds it, they were all killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from lockstep.launch.node.snapshot_memory import SnapshotMemory

PREFIX = "lockstep-job-"
LOCK = "lock"
SNAPSHOTS = "snapshots"  # a file with the path of the job's folder in memory


def make_scratch() -> Path:
    """Create a scratch folder and lock it until this process and its forked children have ended."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder / f"{LOCK}-new", os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # a file system without locks: then the folder is never taken for an abandoned one
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / f"{LOCK}-new", folder / LOCK)  # no other process finds it unlocked
    return folder


def note_snapshots(scratch: Path, folder: str) -> None:
    """Record the job's folder in memory, which must be removed with the scratch folder."""
    (scratch / SNAPSHOTS).write_text(folder)


def remove_scratch(folder: Path) -> None:
    """Remove a scratch folder, and the folder in memory of its job."""
    with suppress(OSError):
        SnapshotMemory.remove_abandoned(Path((folder / SNAPSHOTS).read_text()))
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove this user's scratch folders that no process holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another job removes it, for example
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_scratch(folder)
            finally:
                os.close(lock)
