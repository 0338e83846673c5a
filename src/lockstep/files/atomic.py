"""Writing so that a reader, or a crash, finds all of a file or nothing of it.

A file is written under another name, which begins with a point, and renamed. A kill leaves that name behind; the next
process to write the file removes it first, unless several may write at a time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial-"  # what the name of a file or folder begins with while it is being written


def partial_of(path: Path) -> Path:
    """Where a file or folder is written before it has its name; the suffix, which libraries look at, is the same."""
    return path.with_name(PARTIAL + path.name)


@contextmanager
def replacing(path: Path, durable: bool = False, shared: bool = False) -> Iterator[Path]:
    """A path to write a file to, which takes its place at the end; after an error it is removed.

    Args:
        durable: Whether the file has to survive a power failure, as far as the file system lets a folder be synced.
        shared: Whether another process may write the same file at the same time; the last one to end wins.

    Raises:
        OSError: It cannot be put on the disk, or be given its name.
    """
    partial = partial_of(path.with_name(f"{os.getpid()}-{path.name}") if shared else path)
    partial.unlink(missing_ok=True)  # it may be a link, whose target would be overwritten, or a pipe
    try:
        yield partial
        if durable:
            sync(partial)
        os.replace(partial, path)
    except BaseException:
        if partial.parent.is_dir():
            partial.unlink(missing_ok=True)
        raise
    if durable:
        with suppress(OSError):  # the file is there already
            sync(path.parent)


def sync(path: Path) -> None:
    """Have the kernel put a file, or a folder's list of names, on the disk.

    Raises:
        OSError: It cannot, other than because the file system syncs no folders.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
