"""A small file system in memory and a limit on the size of files, for tests of full and read-only disks."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let the system refuse what is larger, as it does on a full disk; a part of a line still fits."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets how many bytes are free on all disks, as the system reports it."""

    def leave(size_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size_bytes))

    return leave


class SmallDisk:
    """A file system in memory that can be filled, emptied and made read-only."""

    def __init__(self, path: Path):
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def empty(self) -> None:
        self._ballast.unlink()

    def allow_writing(self, allowed: bool) -> None:
        """Make it writable or read-only; the system refuses read-only while files are open for writing."""
        subprocess.run(["mount", "-o", f"remount,{'rw' if allowed else 'ro'}", str(self.path)], check=True)
