"""The folder of a job's copies on one host, which is removed with the job."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from lockstep.launch.staging.stage_options import PREFIX
from lockstep.launch.staging.tar_stream import CopyError

OWNER, REMOVED = "owner", "-removed"


class CopiesFolder:
    """The folder of a job's copies on this host.

    The process that made it holds a lock of a file in it. A folder of this host without a process is removed by the
    next job.

    Raises:
        CopyError: It cannot be created, or another host has created it.
    """

    def __init__(self, folder: str) -> None:
        self.path = Path(folder)
        _remove_abandoned(self.path.parent)
        try:
            self.path.mkdir(mode=0o700)
            self._owner = os.open(self.path / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            why = f"other hosts share {self.path.parent}; name a folder that is on each host's own disk by --stage-dir"
            raise CopyError(why) from None
        except OSError as error:
            why = f"{self.path} cannot be created: {error.strerror}"
            raise CopyError(f"{why}; choose another folder by --stage-dir") from None
        with suppress(OSError):  # a file system without locks: then the folder is never taken for an abandoned one
            fcntl.flock(self._owner, fcntl.LOCK_EX)
            os.write(self._owner, socket.gethostname().encode())

    def remove(self) -> None:
        _remove(self.path)
        os.close(self._owner)


def _remove_abandoned(parent: Path) -> None:
    """Remove this host's folders of jobs whose process here was killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            if folder.name.endswith(REMOVED):
                _remove(folder)
                continue
            with open(folder / OWNER, "r+") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if owner.read() == socket.gethostname():
                    _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder with read-only folders, under another name, so that nothing is written to it any more."""
    gone = folder.with_name(folder.name.removesuffix(REMOVED) + REMOVED)
    with suppress(OSError):
        folder.rename(gone)
    for path, _, _ in os.walk(gone):
        with suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(gone, ignore_errors=True)
