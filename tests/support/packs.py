"""Pack a folder in a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lockstep.data.packed import pack_writer
from lockstep.data.packed.encode import Encoding


def pack_folder(folder: Path, out: Path) -> Path:
    """Pack a folder unchanged into several tar files, in this process."""
    pack_writer.write(pack_writer.make_plan(folder, out, Encoding(), 8192), 1, lambda count: None)
    return out


def slow(seconds: float, advance: Callable[[int], None]) -> None:
    """A task that takes long."""
    time.sleep(seconds)
    advance(1)
