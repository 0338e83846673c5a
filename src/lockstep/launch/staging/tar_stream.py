"""Pack files and folders into one tar stream, and unpack it.

Source number N is the member `N/NAME` with everything in it. Each file is opened and sized once. A link that leads out
of its source to a file is packed as that file. Sockets, pipes and devices are left out.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tarfile import TarInfo
from typing import IO, NamedTuple, Protocol

from lockstep.errors import LockstepError

CHUNK_BYTES = 1 << 20
ZEROS = bytes(CHUNK_BYTES)
THREADS = 32  # on a network file system, a call takes long, but many are served at once
AHEAD = 2 * THREADS  # files that are read before they are needed, each of at most a chunk
UNFINISHED = re.compile(r"\.pyc\.\d+$")  # while Python writes a .pyc file
CHANGED = "has changed while it was copied; start again when nothing writes to it"


class CopyError(LockstepError):
    """A file cannot be read or copied."""


class Entry(NamedTuple):
    """A path in a source, without links in its folders, and the status of a folder before it was listed."""

    path: str
    is_link: bool = False
    folder: os.stat_result | None = None


@dataclass(frozen=True)
class SharedSource:
    """A file or folder to copy.

    Args:
        root: Its path, without links.
        left_out: Paths in it that are not copied.
        is_environment: Python may write bytecode to the source and to the copy. Otherwise, the copy is read-only.
    """

    root: str
    left_out: tuple[str, ...] = ()
    is_environment: bool = False

    def has(self, path: str) -> bool:
        """Whether an absolute path is one in the source that is copied."""
        return f"{path}/".startswith(f"{self.root}/") and not self._leaves_out(path)

    def _leaves_out(self, path: str) -> bool:
        return any(f"{path}/".startswith(f"{self.root}/{own}/") for own in self.left_out)

    def entries(self, pool: ThreadPoolExecutor) -> Iterator[Entry]:
        """Yield what the source contains, folders before their contents."""
        if not os.path.isdir(self.root):
            yield Entry(self.root)
            return
        folders = [self.root]
        while folders:
            below = []
            for folder, listing in zip(folders, pool.map(self._listing, folders), strict=True):
                yield Entry(folder, folder=listing[0])
                for path, kind in listing[1]:
                    if kind == stat.S_IFDIR:
                        below.append(path)
                    else:
                        yield Entry(path, kind == stat.S_IFLNK)
            folders = below

    def _listing(self, folder: str) -> tuple[os.stat_result, list[tuple[str, int]]]:
        """Return a folder's status, and its files, links and folders."""
        found = []
        try:
            status = os.stat(folder)
            with os.scandir(folder) as entries:
                for entry in entries:
                    is_file, is_folder = entry.is_file(follow_symlinks=False), entry.is_dir(follow_symlinks=False)
                    is_wanted = is_file or is_folder or entry.is_symlink()
                    if is_wanted and not UNFINISHED.search(entry.name) and not self._leaves_out(entry.path):
                        kind = stat.S_IFREG if is_file else stat.S_IFDIR if is_folder else stat.S_IFLNK
                        found.append((entry.path, kind))
        except OSError as error:
            raise _unreadable(error, folder) from None
        return status, sorted(found)

    def mode(self, mode: int) -> int:
        """Return the mode of the copy of a file or folder with this mode."""
        mode = mode & 0o777 | (0o500 if stat.S_ISDIR(mode) else 0o400)
        return mode | 0o200 if self.is_environment else mode & ~0o222


def pack(sources: Sequence[SharedSource]) -> Iterator[bytes]:
    """Yield the tar stream of the sources, in chunks.

    Raises:
        CopyError: A file cannot be read, or has changed while it was copied.
    """
    pool, chunk = ThreadPoolExecutor(THREADS), bytearray()
    try:
        for number, source in enumerate(sources):
            for piece in _pieces(source, f"{number}/{os.path.basename(source.root)}", pool):
                chunk += piece
                if len(chunk) >= CHUNK_BYTES:
                    yield bytes(chunk)
                    chunk.clear()
        yield bytes(chunk) + bytes(2 * tarfile.BLOCKSIZE)
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(source: SharedSource, name: str, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    """Yield the members of a source in small pieces."""
    entries = list(source.entries(pool))
    waiting: deque[Future[Iterator[bytes]]] = deque()
    for entry in entries:
        waiting.append(pool.submit(_member, source, entry, name + entry.path.removeprefix(source.root)))
        if len(waiting) > AHEAD:
            yield from waiting.popleft().result()
    while waiting:
        yield from waiting.popleft().result()
    if not source.is_environment:
        for path in filter(None, pool.map(_changed_folder, entries)):
            raise CopyError(f"{path} {CHANGED}")


def _changed_folder(entry: Entry) -> str:
    """Return the path of a folder whose contents have changed since it was listed, or ""."""
    try:
        changed = entry.folder and os.stat(entry.path).st_mtime_ns != entry.folder.st_mtime_ns
    except OSError:
        return entry.path
    return entry.path if changed else ""


def _member(source: SharedSource, entry: Entry, name: str) -> Iterator[bytes]:
    """Return the pieces of a member. A file that fits into a chunk has been read by then."""
    info = TarInfo(name)
    try:
        if entry.folder:
            info.type, info.mode = tarfile.DIRTYPE, source.mode(entry.folder.st_mode)
            return iter([_header(info)])
        if entry.is_link and (target := os.path.realpath(entry.path)) and _is_kept(source, target):
            info.type, info.linkname = tarfile.SYMTYPE, target
            if source.has(target):
                info.linkname = os.path.relpath(target, os.path.dirname(entry.path))
            return iter([_header(info)])
        return _file(source, entry, info)
    except OSError as error:
        raise _unreadable(error, entry.path) from None


def _is_kept(source: SharedSource, target: str) -> bool:
    """Whether a link stays a link: one that leads to a file that is not copied is packed as that file."""
    return source.has(target) or not os.path.isfile(target)


def _file(source: SharedSource, entry: Entry, info: TarInfo) -> Iterator[bytes]:
    # Without O_NONBLOCK, a pipe that has replaced the file would be waited for.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if entry.is_link else os.O_NOFOLLOW)
    file = open(entry.path, "rb", buffering=0, opener=lambda path, _: os.open(path, flags))  # noqa: SIM115
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise CopyError(f"{entry.path} {CHANGED}")
    info.size, info.mode, info.mtime = status.st_size, source.mode(status.st_mode), status.st_mtime_ns // 10**9
    pieces = _contents(file, entry.path, status)
    if status.st_size <= CHUNK_BYTES:
        return iter([_header(info), *pieces])
    return chain([_header(info), next(pieces)], pieces)  # started, so an error elsewhere closes the file


def _contents(file: IO[bytes], path: str, before: os.stat_result) -> Iterator[bytes]:
    """Yield a file's contents, and the zeros that fill its last block; close it."""
    left = before.st_size
    try:
        with file:
            while left and (data := file.read(min(left, CHUNK_BYTES))):
                left -= len(data)
                yield data
            after = os.fstat(file.fileno())
    except OSError as error:
        raise _unreadable(error, path) from None
    # The time of the inode also changes if another environment links the file, as uv and conda do.
    if left or (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise CopyError(f"{path} {CHANGED}")
    yield bytes(-before.st_size % tarfile.BLOCKSIZE)


def _header(info: TarInfo) -> bytes:
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _unreadable(error: OSError, path: str) -> CopyError:
    return CopyError(f"{path} cannot be read: {error.strerror or error}")


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def unpack(stream: Readable, folder: Path) -> tuple[int, int]:
    """Unpack a stream of `pack` into a folder; return the number of files and their bytes.

    Links and the modes of folders are set last, so nothing is written through a link.

    Raises:
        OSError: The disk is full, for example.
        tarfile.TarError: The stream is damaged.
    """
    files, size, last = 0, 0, list[Callable[[], None]]()
    names = {"encoding": "utf-8", "errors": "surrogateescape"}
    with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK_BYTES, **names) as archive:  # type: ignore[call-overload]
        for info in archive:
            archive.members = []  # which would grow with each file
            if ".." in info.name.split("/") or info.name.startswith("/"):
                raise tarfile.TarError(f"{info.name!r} is not a name of a member")
            path = folder / info.name
            if info.name.count("/") == 1:  # the first member of a source
                path.parent.mkdir()
            if info.isdir():
                path.mkdir()
                last.append(partial(os.chmod, path, info.mode))
            elif info.issym():
                last.append(partial(os.symlink, info.linkname, path))
            else:
                content = archive.extractfile(info)
                assert content
                _write(content, path, info)
                files, size = files + 1, size + info.size
    for finish in reversed(last):
        finish()
    return files, size


def _write(content: IO[bytes], path: Path, info: TarInfo) -> None:
    with open(path, "xb") as file:
        while data := content.read(CHUNK_BYTES):
            if data == ZEROS[: len(data)]:  # a hole, of a sparse file for example
                file.seek(len(data), os.SEEK_CUR)
            else:
                file.write(data)
        file.truncate(info.size)
        os.fchmod(file.fileno(), info.mode)
    os.utime(path, (info.mtime, info.mtime))
