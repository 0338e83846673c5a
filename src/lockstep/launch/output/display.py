"""What the launcher shows: its own words, and its workers' lines on the terminal and in files.

The form of the prefix, and the files under a folder, are Horovod's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

from lockstep.errors import ConfigError

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
    """How the workers' lines are shown and kept.

    Ranks in file names have as many digits as the last of `workers` ranks, so that names sort as numbers do.

    Args:
        timestamps: The time is put before each line.
        folder: For files rank.N/stdout and rank.N/stderr, as Horovod names them.
        prefixed: Each line begins with its worker's rank and the stream's name.
        logs: For files worker-N.log, both streams in each.
    """

    workers: int
    timestamps: bool = False
    folder: Path | None = None
    prefixed: bool = True
    logs: Path | None = None

    def files(self, rank: int, name: Name) -> list[Path]:
        """Where a stream's lines are kept."""
        number = f"{rank:0{len(str(self.workers - 1))}}"
        files = [self.folder / f"rank.{number}" / name] if self.folder else []
        return [*files, self.logs / f"worker-{number}.log"] if self.logs else files

    def prefix(self, rank: int, name: Name) -> bytes:
        when = time.strftime("%a %b %d %H:%M:%S %Y") if self.timestamps else ""
        return f"{when}[{rank}]<{name}>:".encode() if self.prefixed else when.encode()


class Display:
    """Shows and keeps lines until `close`.

    Where lines cannot be written any more, be it that a reader goes away or that a disk is full, the showing ends,
    not the job.

    Raises:
        ConfigError: There can be no files in the plan's folders.
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
                raise ConfigError(f"{flag} {folder} cannot be written")
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
        """Write a worker's lines to the launcher's own stream of that name."""
        if not lines or name in self._gone:
            return
        prefix = self._plan.prefix(rank, name)
        own = sys.stdout if name == "stdout" else sys.stderr
        try:
            own.buffer.write(b"".join(prefix + line for line in lines))
            own.buffer.flush()
        except OSError as error:
            self._gone.add(name)
            _give_up(own)
            if not isinstance(error, BrokenPipeError):
                say(f"lockstep: {name} cannot be written: {error.strerror}")

    def log_of(self, rank: int) -> Path | None:
        """The file in which a worker's last words are, if there is one."""
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
