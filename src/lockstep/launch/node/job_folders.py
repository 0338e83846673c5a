"""A job's folders on one host: a scratch folder, and in a memory file system the snapshots of the job's state.

The processes that remove the scratch folder hold its lock. If no process holds it, all were killed, and the next job
removes it. A folder gets another name before it is removed, which lets the next job go on if that was
interrupted. The semaphores of the workers' multiprocessing have the scratch folder's name. The snapshots outlive the
generations of the workers, and are removed with the scratch folder that they belong to. The workers define their
contents (`lockstep.run.checkpoints.memory_snapshots`).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "lockstep-job-"
SNAPSHOTS_PREFIX = "lockstep-snapshots-"
REMOVED = "-removed"  # the end of the name of a folder whose removal was started
MEMORY = Path("/dev/shm")  # where Linux has semaphores, too; `lockstep.world.autoload` names them
LOCK = "lock"
ABANDONED_SECONDS = 6 * 3600.0  # other containers may share the memory, with scratch folders that are not seen here
SNAPSHOTS = "snapshots"  # a file with the path of the job's snapshots
OWNER = "owner"  # a file beside the snapshots, with the path of the scratch folder that they belong to


def make_scratch() -> Path:
    """Create a scratch folder and lock it until this process and its forked children have ended."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder / f"{LOCK}-new", os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # a file system without locks: then the folder is never taken for an abandoned one
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / f"{LOCK}-new", folder / LOCK)  # no other process finds it unlocked
    return folder


def new_snapshots_path() -> Path:
    """Return a unique folder name in shared memory, or, without that, among temporary files."""
    root = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    return root / f"{SNAPSHOTS_PREFIX}{secrets.token_hex(8)}"


def own_snapshots(scratch: Path, snapshots: Path, discard: bool) -> None:
    """Let the folder of snapshots, which may exist from an earlier generation, belong to a scratch folder.

    If it cannot be created, the workers report that when they write to it.

    Args:
        discard: Remove existing contents, which are older than the job's state.
    """
    if discard:
        _remove(snapshots)
    (scratch / SNAPSHOTS).write_text(str(snapshots))
    with suppress(OSError):
        snapshots.mkdir(mode=0o700, exist_ok=True)
        if _is_own(snapshots):
            (snapshots / OWNER).write_text(str(scratch))


def remove_scratch(scratch: Path) -> None:
    """Remove a scratch folder, its semaphores, and its snapshots unless they belong to another one.

    They do if the host was unreachable and is back.
    """
    with suppress(OSError):
        for semaphore in MEMORY.glob(f"sem.{scratch.name}-*"):
            semaphore.unlink()
    with suppress(OSError):
        snapshots = Path((scratch / SNAPSHOTS).read_text())
        if (snapshots / OWNER).read_text() == str(scratch):
            _remove(snapshots)
    _remove(scratch)


def remove_abandoned() -> None:
    """Remove this user's scratch folders that no process holds, and old snapshots whose scratch folder is gone.

    Interrupted removals are completed. A batch system deletes the TMPDIR of a job that it has killed, and with it the
    note of the job's snapshots.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another job removes it, for example
            if not _is_own(folder) or _removed_again(folder):
                continue
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_scratch(folder)
            finally:
                os.close(lock)
    for snapshots in new_snapshots_path().parent.glob(f"{SNAPSHOTS_PREFIX}*"):
        with suppress(OSError):
            if _removed_again(snapshots):
                continue
            is_old = time.time() - snapshots.lstat().st_mtime > ABANDONED_SECONDS
            if is_old and not Path((snapshots / OWNER).read_text()).exists():
                _remove(snapshots)


def _is_own(path: Path) -> bool:
    """Whether a path is a folder of this user, and not a link to one."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _remove(path: Path) -> None:
    with suppress(OSError):
        if _is_own(path):
            shutil.rmtree(path.rename(f"{path}-{secrets.token_hex(4)}{REMOVED}"), ignore_errors=True)


def _removed_again(path: Path) -> bool:
    """Remove this user's folder if that was interrupted before; return True if it was."""
    if has_begun := path.name.endswith(REMOVED) and _is_own(path):
        shutil.rmtree(path, ignore_errors=True)
    return has_begun
