"""One writer a folder: a lock that the system takes back when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import ConfigError


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder against a second writer, for as long as this process lives.

    Raises:
        ConfigError: Another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another `lockstep data` is writing {folder}; wait for it, or name another folder") from None
    except OSError:
        pass  # a file system without locks, such as Lustre may be
