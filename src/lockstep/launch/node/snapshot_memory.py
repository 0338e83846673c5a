"""A host's snapshots of a job's state: a folder in a memory file system that outlives the workers and restarts.

The node process creates the folder and removes it at the job's end. If the node process was killed, its guard removes
it; if both were killed, a later job's node process does. The workers define its contents
(`lockstep.train.checkpoints.memory_snapshots`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

PREFIX = "lockstep-snapshots-"
OWNER_FILE = "owner"  # the pid of the responsible node process
ABANDONED_SECONDS = 6 * 3600.0  # longer than a job waits for hosts between two starts of its workers


def new_path() -> Path:
    """Return a unique folder name in shared memory, or, without that, among temporary files."""
    memory = Path("/dev/shm")
    root = memory if memory.is_dir() else Path(tempfile.gettempdir())
    return root / f"{PREFIX}{secrets.token_hex(8)}"


class SnapshotMemory:
    """Make this process responsible for the folder, which may exist from before a restart of the workers.

    If it cannot be created, the workers report that when they write to it.

    Args:
        discard: Remove existing contents, which are older than the job's state.
    """

    def __init__(self, path: Path, discard: bool = False) -> None:
        self._path = path
        _sweep(path.parent)
        if discard:
            _remove(path)
        with suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            if _is_own(path):
                (path / OWNER_FILE).write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove the folder, unless another process is responsible now, because the host was lost and is back."""
        if _owner(self._path) == os.getpid():
            _remove(self._path)

    @staticmethod
    def remove_abandoned(path: Path) -> None:
        """Remove a folder whose process was killed."""
        owner = _owner(path)
        if owner is not None and not psutil.pid_exists(owner):
            _remove(path)


def _sweep(root: Path) -> None:
    """Remove folders of jobs that were killed together with all their guards."""
    with suppress(OSError):
        for path in root.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if _is_own(path) and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    SnapshotMemory.remove_abandoned(path)


def _is_own(path: Path) -> bool:
    """Whether a path is a folder of this user, and not a link to one."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _owner(path: Path) -> int | None:
    try:
        return int((path / OWNER_FILE).read_text())
    except (OSError, ValueError):
        return None


def _remove(path: Path) -> None:
    with suppress(OSError):
        if _is_own(path):
            shutil.rmtree(path, ignore_errors=True)
