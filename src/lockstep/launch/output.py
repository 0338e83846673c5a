"""The workers' output on its way to the launcher's own: whole lines, each with its worker's rank before it.

One thread reads every worker's pipes and writes a line when it is complete, so that lines of two workers are never
mixed. The form of the prefix, and the files under a folder, are Horovod's.
"""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, TextIO

from lockstep.errors import ConfigError

CHUNK_BYTES = 1 << 16
BAR_SECONDS = 2.0  # how often a progress bar, which overwrites its own line, is shown as a line
Name = Literal["stdout", "stderr"]


def say(text: str) -> None:
    """Print a line to stderr; if nobody reads it, so be it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def _give_up(stream: TextIO) -> None:
    """Let what is held back for a stream, and all that follows, go nowhere: else Python fails at its own end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@dataclass(frozen=True)
class OutputPlan:
    """How the workers' lines are shown: after a time or not, and in files `folder`/rank.N/{stdout,stderr} as well.

    N has as many digits as the last of `workers` ranks, so that names sort as numbers do.
    """

    workers: int
    timestamps: bool = False
    folder: Path | None = None

    def file(self, rank: int, name: Name) -> Path | None:
        return self.folder and self.folder / f"rank.{rank:0{len(str(self.workers - 1))}}" / name

    def prefix(self, rank: int, name: Name) -> bytes:
        when = time.strftime("%a %b %d %H:%M:%S %Y") if self.timestamps else ""
        return f"{when}[{rank}]<{name}>:".encode()


@dataclass
class Lines:
    """Cuts a stream of bytes into whole lines.

    Of a line that carriage returns overwrite, the state that stays is a line; before that, one every BAR_SECONDS.
    """

    clock: Callable[[], float] = time.monotonic
    held: bytes = b""
    shown: bytes = b""
    shown_at: float = float("-inf")

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that this chunk completes, each with its line feed."""
        *whole, self.held = (self.held + chunk).split(b"\n")
        lines = [line for text in whole for line in self._complete(text)]
        overwritten, bar, rest = self.held.rpartition(b"\r")
        if bar:
            state = _what_stays(overwritten)
            self.held = state + bar + rest
            if state not in (b"", self.shown) and self.clock() - self.shown_at >= BAR_SECONDS:
                self.shown, self.shown_at = state, self.clock()
                lines.append(state + b"\n")
        return lines

    def rest(self) -> list[bytes]:
        """The last line of a stream that ends without a line feed."""
        text, self.held = self.held, b""
        return self._complete(text) if text else []

    def _complete(self, text: bytes) -> list[bytes]:
        line, shown = _what_stays(text), self.shown
        self.shown, self.shown_at = b"", float("-inf")
        return [] if shown and line == shown else [line + b"\n"]


def _what_stays(text: bytes) -> bytes:
    """What a terminal shows in the end of a line with carriage returns; that of "\\r\\n" counts for nothing."""
    return next((state for state in reversed(text.split(b"\r")) if state), b"")


@dataclass
class Stream:
    """One worker's stdout or stderr. `rank` may change while it is read: an elastic job's workers move up."""

    rank: int
    name: Name
    writer: int | None
    lines: Lines = field(default_factory=Lines)

    @property
    def path(self) -> str:
        """A name under which this process can open the writing end."""
        return f"/dev/fd/{self.writer}"

    def release(self) -> None:
        """Close the writing end here; the stream then ends when the children that have inherited it do."""
        if self.writer is not None:
            os.close(self.writer)
            self.writer = None


class Output:
    """Carries the streams of workers on while a `with` block runs; at its end nothing that they wrote is lost.

    Where lines cannot be written any more, be it that a reader goes away or that a disk is full, the showing ends,
    not the job.

    Raises:
        ConfigError: There can be no files in the plan's folder.
    """

    def __init__(self, plan: OutputPlan) -> None:
        if plan.folder:
            try:
                plan.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--output-filename {plan.folder}: {error.strerror}") from None
            if not os.access(plan.folder, os.W_OK | os.X_OK):
                raise ConfigError(f"--output-filename {plan.folder} cannot be written")
        self._plan = plan
        self._selector = selectors.DefaultSelector()
        self._files: dict[Path, BinaryIO] = {}
        self._gone: set[Name | Path] = set()
        self._stop, self._stopping = os.pipe()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._carry, name="lockstep-output", daemon=True)

    def __enter__(self) -> Output:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.write(self._stopping, b".")
        self._thread.join()
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def open(self, rank: int, name: Name) -> Stream:
        """A new stream; until its `writer` is released, it has no end before the job has."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        stream = Stream(rank, name, writer)
        self._selector.register(reader, selectors.EVENT_READ, stream)
        return stream

    def _carry(self) -> None:
        stop = False
        while not stop:
            ready = self._selector.select()
            stop = any(key.fd == self._stop for key, _ in ready)
            for key, _ in ready:
                if key.data:
                    self._read(key.fd, key.data)
        for key in list(self._selector.get_map().values()):
            if key.data:
                key.data.release()
                while self._read(key.fd, key.data):
                    pass
                self._close(key.fd, key.data)
        for end in (self._stop, self._stopping):
            os.close(end)
        self._selector.close()

    def _read(self, reader: int, stream: Stream) -> bool:
        """Read and show what is there now; whether more may follow."""
        try:
            chunk = os.read(reader, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._show(stream, stream.lines.feed(chunk))
        return bool(chunk) or self._close(reader, stream)

    def _close(self, reader: int, stream: Stream) -> bool:
        """Show the last line of a stream and forget it, once; False."""
        if reader in self._selector.get_map():
            self._selector.unregister(reader)
            os.close(reader)
            self._show(stream, stream.lines.rest())
        return False

    def _show(self, stream: Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        path = self._plan.file(stream.rank, stream.name)
        if path and path not in self._gone:
            try:
                self._keep(path, b"".join(lines))
            except OSError as error:
                self._gone.add(path)
                say(f"lockstep: {path} cannot be written: {error.strerror}")
        if stream.name in self._gone:
            return
        prefix = self._plan.prefix(stream.rank, stream.name)
        own = sys.stdout if stream.name == "stdout" else sys.stderr
        try:
            own.buffer.write(b"".join(prefix + line for line in lines))
            own.buffer.flush()
        except OSError as error:
            self._gone.add(stream.name)
            _give_up(own)
            if not isinstance(error, BrokenPipeError):
                say(f"lockstep: {stream.name} cannot be written: {error.strerror}")

    def _keep(self, path: Path, text: bytes) -> None:
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = path.open("wb", buffering=0)
        while text:
            text = text[self._files[path].write(text) :]
