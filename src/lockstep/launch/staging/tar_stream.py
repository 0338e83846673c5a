"""Pack files and folders into one tar stream, and unpack it.

Source number N is the member `N/NAME` with everything in it. Each path is opened and sized once. A link that leads out
of its source to a file is packed as that file. Sockets, pipes and devices are left out.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tarfile import TarInfo
from typing import IO, Any, NamedTuple, Protocol

from lockstep.errors import LockstepError

CHUNK_BYTES = 1 << 20
ZEROS = bytes(CHUNK_BYTES)
THREADS = 32  # on a network file system, a call takes long, but many are served at once
AHEAD = 2 * THREADS  # paths that are opened before they are needed
FORMAT: dict[str, Any] = {"format": tarfile.GNU_FORMAT, "encoding": "utf-8", "errors": "surrogateescape"}
UNFINISHED = re.compile(r"\.pyc\.\d+$")  # while Python writes a .pyc file
CHANGED = "has changed while it was copied; start again when nothing writes to it"
# Without O_NONBLOCK, a pipe that has replaced the file would be waited for.
FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class CopyError(LockstepError):
    """A file cannot be read or copied."""


class OpenedPath(NamedTuple):
    """A path in a source with its member. `names` are those in a folder; a link has no descriptor."""

    path: str
    member: TarInfo
    descriptor: int | None = None
    status: os.stat_result | None = None
    names: Sequence[str] = ()


class SharedSource(NamedTuple):
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
        is_in = f"{path}/".startswith
        return is_in(f"{self.root}/") and not any(is_in(f"{own}/") for own in self.left_out)

    def open(self, path: str) -> OpenedPath:
        """Open a path of the source, without links in its folders.

        Raises:
            CopyError: It cannot be read.
        """
        try:
            return self._open(path)
        except OSError as error:
            raise CopyError(f"{path} cannot be read: {error.strerror or error}") from None

    def _open(self, path: str) -> OpenedPath:
        member = TarInfo(path.removeprefix(os.path.dirname(self.root)).lstrip("/"))
        try:
            descriptor = os.open(path, FLAGS | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            target = os.path.realpath(path)
            if self.has(target) or not os.path.isfile(target):
                member.type, member.linkname = tarfile.SYMTYPE, target
                if self.has(target):
                    member.linkname = os.path.relpath(target, os.path.dirname(path))
                return OpenedPath(path, member)
            descriptor = os.open(target, FLAGS)
        status = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(status.st_mode)
        if not is_folder and not stat.S_ISREG(status.st_mode):
            raise CopyError(f"{path} {CHANGED}")
        mode = status.st_mode & 0o777 | (0o500 if is_folder else 0o400)
        member.mode = mode | 0o200 if self.is_environment else mode & ~0o222
        member.mtime = status.st_mtime_ns // 10**9
        if is_folder:
            member.type = tarfile.DIRTYPE
            return OpenedPath(path, member, descriptor, status, [*self._names(path, descriptor)])
        member.size = status.st_size
        return OpenedPath(path, member, descriptor, status)

    def _names(self, folder: str, descriptor: int) -> Iterator[str]:
        with os.scandir(descriptor) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                is_wanted = entry.is_file() or entry.is_dir(follow_symlinks=False) or entry.is_symlink()
                path = os.path.join(folder, entry.name)
                if is_wanted and not UNFINISHED.search(entry.name) and self.has(path):
                    yield path


def pack(sources: Sequence[SharedSource], stream: IO[bytes]) -> None:
    """Write the tar stream of the sources.

    Raises:
        CopyError: A file cannot be read, or has changed while it was copied.
    """
    archive = tarfile.open(mode="w|", fileobj=stream, bufsize=CHUNK_BYTES, **FORMAT)  # noqa: SIM115
    with ThreadPoolExecutor(THREADS) as pool, archive:
        for number, source in enumerate(sources):
            folders, waiting = list[OpenedPath](), [source.root]
            while waiting:
                batch = waiting[-AHEAD:]
                del waiting[-AHEAD:]
                for opened in pool.map(source.open, batch):
                    opened.member.name = f"{number}/{opened.member.name}"
                    _add(archive, opened)
                    waiting += opened.names
                    if opened.member.isdir() and not source.is_environment:
                        folders.append(opened)
            for opened, is_changed in zip(folders, pool.map(_is_changed, folders), strict=True):
                if is_changed:
                    raise CopyError(f"{opened.path} {CHANGED}")


def _add(archive: tarfile.TarFile, opened: OpenedPath) -> None:
    archive.members = []  # type: ignore[attr-defined]  # which would grow with each file
    if opened.descriptor is None or opened.member.isdir():
        archive.addfile(opened.member)
        if opened.descriptor is not None:
            os.close(opened.descriptor)
        return
    with os.fdopen(opened.descriptor, "rb", buffering=0) as file:
        try:
            archive.addfile(opened.member, file)
            after = os.fstat(file.fileno())
        except OSError as error:
            why = f"cannot be read: {error.strerror}" if error.errno else CHANGED  # it is shorter
            raise CopyError(f"{opened.path} {why}") from None
    # The time of the inode also changes if another environment links the file, as uv and conda do.
    before = opened.status
    if before and (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise CopyError(f"{opened.path} {CHANGED}")


def _is_changed(folder: OpenedPath) -> bool:
    try:
        return not folder.status or os.stat(folder.path).st_mtime_ns != folder.status.st_mtime_ns
    except OSError:
        return True


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Archive(tarfile.TarFile):
    def makefile(self, tarinfo: TarInfo, targetpath: Any) -> None:
        """Write a file; blocks of zeros become holes, as in a sparse file."""
        content = self.extractfile(tarinfo)
        assert content
        with open(targetpath, "xb") as file:
            while data := content.read(CHUNK_BYTES):
                if data == ZEROS[: len(data)]:
                    file.seek(len(data), os.SEEK_CUR)
                else:
                    file.write(data)
            file.truncate(tarinfo.size)

    def each(self) -> Iterator[TarInfo]:
        for member in self:
            self.members: list[TarInfo] = []  # which would grow with each file
            yield member


def unpack(stream: Readable, folder: Path) -> None:
    """Unpack a stream of `pack` into a folder.

    Raises:
        OSError: The disk is full, for example.
        tarfile.TarError: The stream is damaged, or has a path that is not in the folder.
    """
    with _Archive.open(mode="r|", fileobj=stream, bufsize=CHUNK_BYTES, **FORMAT) as archive:  # type: ignore[call-overload]
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python 3.11.4
        archive.extractall(folder, archive.each())
