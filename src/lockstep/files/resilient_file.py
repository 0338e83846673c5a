"""A file of lines that outlives a full disk: what the disk does not take is kept, and written when it does."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 64 << 20  # kept in memory; a record takes 0.3 kB, so these are 200,000


class PatientFile:
    """Appends lines, each once and whole in the end, whatever the disk does meanwhile.

    Where the disk is full, gone or read-only, lines are kept in memory, up to `MOST_BYTES`, and each further line tries
    to write them first; that this begins is told once, and that it is over. If the file or its folder is removed or
    renamed while it is open, it is made again with all that it held.

    Args:
        tell: Takes a line for people, from any thread that writes.

    Raises:
        OSError: The file cannot be opened at first.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]):
        self.path, self._absolute = path, path.absolute()
        self._tell = tell
        self._kept = bytearray()
        self._dropped = 0
        self._problem = ""
        self._lock = threading.RLock()  # `tell` may lead back here
        self._process = os.getpid()
        self._descriptor = self._open()

    def write(self, line: str) -> None:
        """Append one line, given without its end; never fails."""
        if self._process != os.getpid():
            self._begin_in_child()
        with self._lock:
            told = self._problem
            if len(self._kept) < MOST_BYTES or not self.flush():
                self._kept += f"{line}\n".encode(errors="backslashreplace")
            else:
                self._dropped += 1
            problem = self.flush()
            if problem and not told:
                self._tell(f"{problem}; new lines are kept in memory until it can be, and training continues")
            elif told and not problem:
                lost = (
                    f"; {self._dropped:,} lines did not fit in memory and are lost"
                    if self._dropped
                    else "; no lines were lost"
                )
                self._dropped = 0
                self._tell(f"{self.path} is writable again{lost}")

    def flush(self) -> str:
        """Write what is kept; returns why that cannot be, or nothing."""
        with self._lock:
            self._problem = ""
            try:
                self._bring_back()
                while self._kept:  # a full disk may take a part
                    del self._kept[: os.write(self._descriptor, self._kept)]
            except OSError as error:
                self._problem = f"{self.path} cannot be written: {error.strerror or error}"
            return self._problem

    def close(self) -> None:
        """Write what is kept, if that can be, and close."""
        with self._lock:
            self.flush()
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin_in_child(self) -> None:
        """In a forked process, leave what is kept to the parent."""
        self._process, self._lock, self._kept = os.getpid(), threading.RLock(), bytearray()

    def _open(self) -> int:
        # A link would lead out of the run's folder.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._absolute, flags, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", str(self.path))
        return descriptor

    def _bring_back(self) -> None:
        """Make the file again where its path does not lead to it: it was removed or renamed, or its disk unmounted."""
        opened = os.fstat(self._descriptor)
        for path in (self.path, self._absolute):  # a folder above may be renamed, or the working directory changed
            with suppress(OSError):
                if os.path.samestat(opened, os.stat(path)):
                    return
        replaced = self._absolute.exists()  # by another process, which has what it wants to keep
        held = b"" if replaced else os.pread(self._descriptor, opened.st_size, 0)
        self._absolute.parent.mkdir(parents=True, exist_ok=True)
        again = self._open()
        self._kept[:0] = held
        os.close(self._descriptor)
        self._descriptor = again
        self._tell(f"{self.path} was removed or renamed; recreated it{'' if replaced else ' with all its lines'}")
