"""Output that decides nothing: what a stream cannot take is dropped, and the job goes on.

A reader such as `head` may have exited, the terminal may be closed, the disk may be full.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import select
import sys
import termios
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

PART = 3000  # bytes: with the rest of the line less than PIPE_BUF, up to which a pipe takes a line as a whole
GONE = (errno.EPIPE, errno.EIO)  # the reader is gone, which needs no message


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line to a stream, by default stderr, and flush it."""
    own = stream or sys.stderr
    put(own, f"{text}\n".encode(getattr(own, "encoding", None) or "utf-8", "replace"))


def put(stream: TextIO, data: bytes) -> str:
    """Write bytes to a stream after what it already buffers.

    They are not buffered themselves: what remained in the buffer of a stream that cannot be written would be an error
    at the end of the program.

    Returns:
        Why they could not be written; "" if they were, or if the reader is gone.
    """
    try:
        descriptor = _descriptor(stream)
        if descriptor is None:  # a notebook's, for example
            stream.write(data.decode(getattr(stream, "encoding", None) or "utf-8", "replace"))
            stream.flush()
            return ""
        stream.flush()
        while data:
            data = data[_write(descriptor, data) :]
    except OSError as error:
        return "" if error.errno in GONE else error.strerror or type(error).__name__
    except ValueError:  # the stream is closed
        return ""
    return ""


def send_line(mark: str, content: Any) -> None:
    """Print content as JSON in marked lines, even if the program has redirected its output.

    The lines are short, so that nothing else that the program prints can be within one.
    """
    with suppress(Exception):
        sys.stdout.flush()
    text, name = json.dumps(content), os.urandom(4).hex()
    for start in range(0, len(text), PART):
        more = "+" if start + PART < len(text) else "."
        os.write(1, f"\n{mark}{name}{more}{text[start : start + PART]}\n".encode())


def received(lines: Iterable[str], mark: str) -> list[Any]:
    """Return the contents that workers have sent completely by `send_line`, given the lines of all."""
    parts, found = defaultdict[str, str](str), []
    for text in (line.removeprefix(mark) for line in lines if line.startswith(mark)):
        parts[text[:8]] += text[9:]
        if text[8:9] == ".":
            found.append(json.loads(parts.pop(text[:8])))
    return found


def has_terminal() -> bool:
    """Return whether this process's streams are one terminal, which it may read: it is in the foreground."""
    try:
        is_one = len(set(map(os.ttyname, range(3)))) == 1
    except OSError:
        return False
    with suppress(OSError):  # the terminal controls no processes
        is_one = is_one and os.tcgetpgrp(0) == os.getpgrp()
    return is_one and fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


@contextmanager
def restored_terminal() -> Iterator[None]:
    """Restore the terminal's settings at the end: a process that was ended at a prompt cannot."""
    settings = termios.tcgetattr(0)
    try:
        yield
    finally:
        with suppress(termios.error):  # it was closed
            if has_terminal():  # setting it from the background would stop this process
                termios.tcsetattr(0, termios.TCSADRAIN, settings)


def keep_going() -> None:
    """Let no output of this process fail from now on, also that of libraries."""
    sys.stdout, sys.stderr = guarded(sys.stdout, drops=True), guarded(sys.stderr, drops=True)


class OutputLost(OSError):
    """A guarded stream cannot be written."""

    def __str__(self) -> str:
        """Return why; "" if the reader is gone, which needs no message."""
        return "" if self.errno in GONE else str(self.strerror)


def with_output(command: Callable[[], int], name: str) -> int:
    """Run a command; return its exit code, or 1 with a message if stdout cannot take what it prints."""
    try:
        code = command()
        sys.stdout.flush()
    except OutputLost as lost:
        keep_going()
        if why := str(lost):
            say(f"{name}: error: the output cannot be written: {why}")
        return 1 if why else 0
    return code


def guarded(stream: TextIO, drops: bool) -> TextIO:
    """Return a text stream to the same file; the same stream if it has no file.

    Args:
        drops: Drop what cannot be written; otherwise raise `OutputLost`.
    """
    descriptor = _descriptor(stream)
    if not isinstance(stream, io.TextIOWrapper) or descriptor is None:
        return stream
    if isinstance(raw := getattr(stream.buffer, "raw", None), _Output):
        raw.drops = drops
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(descriptor, drops)),
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of a file; None for other streams: a notebook's may name one that it does not write to."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _write(descriptor: int, data: bytes | memoryview) -> int:
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:  # another program has set the terminal to non-blocking
            select.select([], [descriptor], [])


class _Output(io.RawIOBase):
    """A file that fails to be written only with `OutputLost`, or never."""

    def __init__(self, descriptor: int, drops: bool) -> None:
        super().__init__()
        self.drops = drops
        self._descriptor = descriptor
        self.name = f"<{descriptor}>"
        self.mode = "w"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            return _write(self._descriptor, view)
        except OSError as error:
            if self.drops:
                return len(view)
            raise OutputLost(error.errno, error.strerror) from None


def report_to_launcher(text: str, lost_peer: bool, code: int, final: bool) -> bool:
    """Write an error to the file in which torchrun, or Lockstep's node process, expects it; return False without one.

    It has torchrun's format, with what Lockstep's launcher needs to find the first of several failures.

    Args:
        final: The error would occur again after a restart.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    ours = {"text": text, "monotonic_seconds": time.monotonic(), "lost_peer": lost_peer, "exit_code": code}
    ours |= {"final": final}
    Path(path).write_text(json.dumps({"message": message, "lockstep": ours}))
    return True
