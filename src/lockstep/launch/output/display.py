"""Print the launcher's messages and the workers' lines, on the terminal and to files.

The prefix and the layout of the folder are Horovod's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import BinaryIO, Literal

from lockstep.errors import ConfigError
from lockstep.files.output import put, say

Name = Literal["stdout", "stderr"]
NAMES: tuple[Name, ...] = ("stdout", "stderr")


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
