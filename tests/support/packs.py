"""Pack a folder or a few files in a test."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path

from lockstep.data import pack_writer
from lockstep.data.pack_writer import Encoding


def pack_folder(folder: Path, out: Path, encoding: Encoding | None = None) -> Path:
    """Pack a folder, by default unchanged, into several tar files, in this process."""
    pack_writer.write(pack_writer.make_plan(folder, out, encoding or Encoding(), 8192), 1, lambda count: None)
    return out


def tar_of(members: dict[str, bytes]) -> bytes:
    """Return a tar file of files with these names."""
    stored = io.BytesIO()
    with tarfile.open(fileobj=stored, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stored.getvalue()


def slow(seconds: float) -> float:
    """Take long, and return for how long."""
    time.sleep(seconds)
    return seconds
