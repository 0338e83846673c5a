"""Pack a folder in a test."""

from __future__ import annotations

import time
from pathlib import Path

from lockstep.data import pack_writer
from lockstep.data.pack_writer import Encoding


def pack_folder(folder: Path, out: Path) -> Path:
    """Pack a folder unchanged into several tar files, in this process."""
    pack_writer.write(pack_writer.make_plan(folder, out, Encoding(), 8192), 1, lambda count: None)
    return out


def slow(seconds: float) -> float:
    """Take long, and return for how long."""
    time.sleep(seconds)
    return seconds
