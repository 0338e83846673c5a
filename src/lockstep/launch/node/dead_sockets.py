"""Remove the sockets of Python's multiprocessing that killed processes leave in the temporary folder.

Every loader process has a folder `pymp-*` with a socket, through which it shares memory, and removes it when it exits.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def socket_folders() -> set[Path]:
    """Return the current folders with such sockets; a loader uses /tmp if TMPDIR is too long for a socket's path."""
    return {each for folder in (tempfile.gettempdir(), "/tmp") for each in Path(folder).glob("pymp-*")}


def remove_dead_sockets(earlier: set[Path]) -> None:
    """Remove this user's folders that are not among `earlier` ones and whose sockets no process has open."""
    for folder in socket_folders() - earlier:  # not by time, because the clock may have been set
        with suppress(OSError):  # its owner may be removing it
            if folder.stat().st_uid != os.getuid():
                continue
            paths = list(folder.iterdir())
            if paths and all(is_dead(path) for path in paths):
                shutil.rmtree(folder)


def is_dead(path: Path) -> bool:
    """Whether a path is a socket that no process has open, in any network namespace.

    Linux looks up the socket before it compares the types: connecting a datagram socket to a living stream socket fails
    with EPROTOTYPE, and the process there does not notice.
    """
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
