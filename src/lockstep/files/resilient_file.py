"""A file of lines that survives a full disk: lines are buffered in memory until they can be written."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.errors import LockstepError


class ResilientFile:
    """Append lines to a file, each exactly once, despite temporary disk errors.

    While the disk is full, missing or read-only, lines are buffered in memory, up to `max_bytes`. Each further write
    first tries to flush them. One message is reported when buffering starts, and one when it ends. If the file or its
    folder is removed or renamed while open, the file is recreated with its previous content. A file that another
    process has put in its place is appended to if `confirm` allows it.

    Args:
        report: Called with a message for the user, from any thread that writes.
        confirm: Raises LockstepError if the folder now belongs to another job, whose file must not be written to; then
            `write`, `flush` and `close` raise it.
    """

    max_bytes = 64 << 20  # 200,000 records of 0.3 kB

    def __init__(self, path: Path, report: Callable[[str], None], confirm: Callable[[], None] = lambda: None):
        self.path, self._absolute = path, path.absolute()
        self._report, self._confirm = report, confirm
        self._buffered = bytearray()
        self._dropped = 0
        self._problem = ""
        self._lock = threading.RLock()  # `report` may call `write`
        self._process = os.getpid()
        self._descriptor = self._open()

    def write(self, line: str) -> None:
        """Append one line, given without its newline. Disk errors are reported, not raised."""
        if self._process != os.getpid():
            self._begin_in_child()
        with self._lock:
            reported = self._problem
            if len(self._buffered) < self.max_bytes or not self.flush():
                self._buffered += f"{line}\n".encode(errors="backslashreplace")
            else:
                self._dropped += 1
            problem = self.flush()
            if problem and not reported:
                self._report(f"{problem}; new lines are kept in memory, and training continues")
            elif reported and not problem:
                lost = (
                    f"; {self._dropped:,} lines did not fit in memory and are lost"
                    if self._dropped
                    else "; no lines were lost"
                )
                self._dropped = 0
                self._report(f"{self.path} is writable again{lost}")

    def flush(self) -> str:
        """Write buffered lines; return the problem if that fails, else ""."""
        with self._lock:
            self._problem = ""
            try:
                self._restore()
                while self._buffered:  # a full disk may accept only a part
                    del self._buffered[: os.write(self._descriptor, self._buffered)]
            except OSError as error:
                self._problem = f"{self.path} cannot be written: {error.strerror or error}"
            return self._problem

    def close(self, restores: bool = True) -> None:
        """Try to write buffered lines, then close the file; `restores`: recreate it if it was removed, even without."""
        with self._lock:
            try:
                if restores or self._buffered:
                    self.flush()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def _begin_in_child(self) -> None:
        """After a fork, leave the buffered lines to the parent."""
        self._process, self._lock, self._buffered = os.getpid(), threading.RLock(), bytearray()

    def _open(self) -> int:
        # A link could lead outside the run folder.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._absolute, flags, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", str(self.path))
        return descriptor

    def _restore(self) -> None:
        """Recreate the file if its path no longer refers to it: it was removed or renamed, or its disk unmounted."""
        opened = os.fstat(self._descriptor)
        for path in (self.path, self._absolute):  # a parent may have been renamed, or the working directory changed
            with suppress(OSError):
                if os.path.samestat(opened, os.stat(path)):
                    return
        replaced = self._absolute.exists()  # by another process, whose content is kept
        held = b"" if replaced else os.pread(self._descriptor, opened.st_size, 0)
        self._absolute.parent.mkdir(parents=True, exist_ok=True)
        again = self._open()
        if replaced:
            try:
                self._confirm()  # once it is open: a job that takes over later replaces the file that was opened
            except LockstepError:
                os.close(again)
                raise
        self._buffered[:0] = held
        os.close(self._descriptor)
        self._descriptor = again
        self._report(f"{self.path} was removed or renamed; recreated it{'' if replaced else ' with all its lines'}")
