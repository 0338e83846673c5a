"""Atomic writes: readers see the whole file or none of it, even after a crash.

A file is written under a temporary name that begins with a dot, then renamed. A killed process leaves the temporary
file behind; the next writer removes it, unless several processes may write at the same time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial-"  # prefix of files and folders that are being written


def partial_of(path: Path) -> Path:
    """Return the temporary path of a file or folder. It keeps the suffix, from which libraries infer the format."""
    return path.with_name(PARTIAL + path.name)


@contextmanager
def replacing(path: Path, durable: bool = False, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends; after an error it is removed.

    Args:
        durable: Sync the file, and its folder where the file system supports that, to survive a power failure.
        shared: Allow other processes to write the same file at the same time; the last one to finish wins.
    """
    partial = partial_of(path.with_name(f"{os.getpid()}-{path.name}") if shared else path)
    partial.unlink(missing_ok=True)  # writing to a link would change its target; writing to a pipe would block
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
        with suppress(OSError):  # the file is already in place
            sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk.

    Raises:
        OSError: Syncing failed. A file system that cannot sync folders is not an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
