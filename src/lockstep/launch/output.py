"""The workers' output at the launcher: split into lines, prefixed, shown on the terminal and written to files.

The prefix and the layout of the folder are Horovod's. A program prints a traceback when it fails, but also logs
tracebacks of errors that it has handled. So a traceback on stderr and the lines after it wait until the worker exits,
or for a few seconds, and are then shown like other lines: the one that ended the job is shown last, and once. The same
holds for other errors that every worker prints before it fails: a SyntaxError, a missing module, unknown arguments.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import BinaryIO, Literal

from lockstep.errors import LOST_PEER, ConfigError
from lockstep.files.output import put, say

LONGEST_BYTES = 1 << 20  # longer lines are split
BAR_SECONDS = 2.0  # interval at which a progress bar, which overwrites its line, is shown as a line
FIRST_LINE = re.compile(
    rb"Traceback \(most recent call last\):"
    rb'|^  File ".*", line \d+$'  # of a SyntaxError in the script
    rb"|^\S*python\S*: (?:can't|No module|Error)|^[Uu]sage: "  # of the interpreter; of argparse and click
)
NEEDS_LOCAL_RANK = re.compile(r"error: the following arguments are required: .*--local[-_]rank")
LOCAL_RANK_FIX = 'as under torchrun, --local_rank is not passed; let the script read int(os.environ["LOCAL_RANK"])'
HOLD_SECONDS = 10.0
HOLD_BYTES = 1 << 20
Name = Literal["stdout", "stderr"]
NAMES: tuple[Name, ...] = ("stdout", "stderr")


@dataclass
class Lines:
    """Splits a stream of bytes into lines.

    If a line is overwritten after carriage returns, return its last state, and before that one state per BAR_SECONDS.
    """

    clock: Callable[[], float] = time.monotonic
    held: bytes = b""
    shown: bytes = b""
    shown_at: float = float("-inf")

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that this chunk completes, each with its line feed."""
        *whole, self.held = (self.held + chunk).split(b"\n")
        if len(self.held) > LONGEST_BYTES:
            whole, self.held = [*whole, self.held], b""
        lines = [line for text in whole for line in self._complete(text)]
        overwritten, bar, rest = self.held.rpartition(b"\r")
        if bar:
            state = _last_state(overwritten)
            self.held = state + bar + rest
            if state not in (b"", self.shown) and self.clock() - self.shown_at >= BAR_SECONDS:
                self.shown, self.shown_at = state, self.clock()
                lines.append(state + b"\n")
        return lines

    def rest(self) -> list[bytes]:
        """Return the last line of a stream that ends without a line feed."""
        text, self.held = self.held, b""
        return self._complete(text) if text else []

    def _complete(self, text: bytes) -> list[bytes]:
        line, shown = _last_state(text), self.shown
        self.shown, self.shown_at = b"", float("-inf")
        return [] if shown and line == shown else [line + b"\n"]


def _last_state(text: bytes) -> bytes:
    """Return what a terminal finally shows of a line with carriage returns, ignoring the one of "\\r\\n"."""
    return next((state for state in reversed(text.split(b"\r")) if state), b"")


@dataclass
class Tracebacks:
    """The delayed lines of one worker: `held`, since the time `since`."""

    clock: Callable[[], float] = time.monotonic
    held: list[bytes] = field(default_factory=list)
    since: float = float("inf")

    def feed(self, lines: Sequence[bytes]) -> list[bytes]:
        """Return the lines that can be shown now."""
        if not self.held:
            first = next((index for index, line in enumerate(lines) if FIRST_LINE.search(line)), len(lines))
            shown, self.held = list(lines[:first]), list(lines[first:])
            if self.held:
                self.since = self.clock()
            return shown
        self.held += lines
        return self.release() if sum(map(len, self.held)) > HOLD_BYTES else []

    def due(self) -> list[bytes]:
        """Return the lines that have waited long enough."""
        return self.release() if self.held and self.clock() - self.since >= HOLD_SECONDS else []

    def release(self) -> list[bytes]:
        """Return all delayed lines."""
        lines, self.held, self.since = self.held, [], float("inf")
        return lines


@dataclass(frozen=True)
class OutputPlan:
    """How the workers' lines are shown and stored.

    Ranks in file names are padded to the width of the highest of `workers` ranks, so that names sort numerically.

    Args:
        timestamps: Print the time before each line.
        folder: Folder of the files rank.N/stdout and rank.N/stderr, named as in Horovod.
        prefixed: Print the worker's rank and the stream's name before each line.
        logs: Folder of the files worker-N.log with both streams.
    """

    workers: int
    timestamps: bool = False
    folder: Path | None = None
    prefixed: bool = True
    logs: Path | None = None

    def files(self, rank: int, name: Name) -> list[Path]:
        """Return the files of a stream."""
        number = f"{rank:0{len(str(self.workers - 1))}}"
        files = [self.folder / f"rank.{number}" / name] if self.folder else []
        return [*files, self.logs / f"worker-{number}.log"] if self.logs else files

    def prefix(self, rank: int, name: Name) -> bytes:
        when = time.strftime("%a %b %d %H:%M:%S %Y") if self.timestamps else ""
        return f"{when}[{rank}]<{name}>:".encode() if self.prefixed else when.encode()


class Display:
    """Shows and stores lines until `close`.

    The files of all workers are created, empty, at once: those of workers that print nothing, too.
    If lines cannot be written any more, because a reader has closed the pipe or the disk is full, the job continues
    without them.

    Raises:
        ConfigError: The plan's folders cannot be created or written.
    """

    def __init__(self, plan: OutputPlan) -> None:
        for flag, folder in (("--output-filename", plan.folder), ("--log-dir", plan.logs)):
            if not folder:
                continue
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{flag} {folder}: {error.strerror}") from None
            if not os.access(folder, os.W_OK | os.X_OK):
                raise ConfigError(f"{flag} {folder}: no permission to write")
        for rank, name in product(range(plan.workers), NAMES):
            for path in plan.files(rank, name):
                try:
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(b"")
                except OSError as error:
                    raise ConfigError(f"{path}: {error.strerror}; remove it, or choose another folder") from None
        self._plan = plan
        self._files: dict[Path, BinaryIO] = {}
        self._gone: set[Name | Path] = set()

    def keep(self, rank: int, name: Name, lines: Sequence[bytes]) -> None:
        """Write a worker's lines to its files."""
        for path in self._plan.files(rank, name) if lines else ():
            if path in self._gone:
                continue
            try:
                self._write(path, b"".join(lines))
            except OSError as error:
                self._gone.add(path)
                say(f"lockstep: {path} cannot be written: {error.strerror}")

    def show(self, rank: int, name: Name, lines: Sequence[bytes]) -> None:
        """Write a worker's lines to the launcher's stream of the same name."""
        if not lines:
            return
        prefix = self._plan.prefix(rank, name)
        error = put(sys.stdout if name == "stdout" else sys.stderr, b"".join(prefix + line for line in lines))
        if error and name not in self._gone:
            self._gone.add(name)
            say(f"lockstep: {name} cannot be written: {error}")

    def log_of(self, rank: int) -> Path | None:
        """Return the file with a worker's last output, if there is one."""
        return next((path for path in reversed(self._plan.files(rank, "stderr")) if path in self._files), None)

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def _write(self, path: Path, text: bytes) -> None:
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = path.open("wb", buffering=0)
        while text:
            text = text[self._files[path].write(text) :]


class Screen:
    """Shows the workers' output, in a thread, so that a blocked terminal does not block the launcher."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._lines: dict[tuple[int, Name], Lines] = {}
        self._tracebacks: dict[int, Tracebacks] = {}
        self._turn = asyncio.Lock()

    async def show(self, rank: int, name: Name, chunk: bytes) -> None:
        """Process a chunk of a worker's output; an empty one is the end."""
        async with self._turn:
            await asyncio.to_thread(self._take, rank, name, chunk)

    async def show_due(self) -> None:
        """Show the tracebacks of workers that keep running, in a loop."""
        while True:
            await asyncio.sleep(1)
            async with self._turn:
                for rank, tracebacks in self._tracebacks.items():
                    if lines := tracebacks.due():
                        await asyncio.to_thread(self._display.show, rank, "stderr", lines)

    def last_lines(self, rank: int) -> str:
        """Return a worker's delayed traceback, with advice if there is any, or ""."""
        held = self._tracebacks[rank].held if rank in self._tracebacks else []
        text = b"".join(held).decode(errors="replace").rstrip("\n")
        return f"{text}\n{LOCAL_RANK_FIX}" if NEEDS_LOCAL_RANK.search(text) else text

    def seen(self, rank: int) -> float | None:
        """Return when a worker's delayed traceback arrived."""
        return self._tracebacks[rank].since if self.last_lines(rank) else None

    def waiting(self) -> list[int]:
        """Return the workers with delayed tracebacks."""
        return [rank for rank, tracebacks in self._tracebacks.items() if tracebacks.held]

    def log_of(self, rank: int) -> Path | None:
        """Return the file with a worker's last output, if there is one."""
        return self._display.log_of(rank)

    def release(self, but: int | None = None) -> None:
        """Show the delayed tracebacks, and lines that are incomplete.

        Args:
            but: The worker whose traceback the failure has. Skip it, equal ones, those it caused, and those in logs.
        """
        for rank, tracebacks in self._tracebacks.items():
            if rank == but or (but is not None and self._is_known(rank, but)):
                continue
            self._display.show(rank, "stderr", tracebacks.release())
        for (rank, name), stream in self._lines.items():
            rest = stream.rest()
            self._display.keep(rank, name, rest)
            self._display.show(rank, name, rest)

    def _is_known(self, rank: int, culprit: int) -> bool:
        text = self.last_lines(rank)
        return text == self.last_lines(culprit) or bool(self.log_of(rank)) or any(words in text for words in LOST_PEER)

    def _take(self, rank: int, name: Name, chunk: bytes) -> None:
        stream = self._lines.setdefault((rank, name), Lines())
        lines = stream.feed(chunk) if chunk else stream.rest()
        self._display.keep(rank, name, lines)
        if name == "stderr":
            lines = self._tracebacks.setdefault(rank, Tracebacks()).feed(lines)
        self._display.show(rank, name, lines)
