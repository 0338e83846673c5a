"""Copies of shared files on this host's disk, for `--stage`.

A copy is a folder named by its manifest's key, a digest of all paths, sizes, times and modes of the source. So a copy
of a source that has changed since, even if only by `chmod`, is never used. It contains:

- `files`: the source's file or folder;
- `manifest`: what the source contains;
- `digests`: of each block of the contents, in the order of the manifest. A copy that was interrupted, or damaged, or
  written before the machine's last start, goes on after its last good block;
- `boot`: the machine's start during which it was completed.

While it is written, the folder's name ends in `.new` and a number, and its writer holds an exclusive lock on it. Jobs
that use a copy hold a shared lock. Copies of the same path with another key that nobody holds are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.files.untrusted import parse_json

BLOCK_BYTES = 1 << 20  # each host passes on whole blocks
DIGEST_BYTES = 16
THREADS = 32  # on a network file system, a call takes long, but many are served at once
AHEAD = 2 * THREADS  # parts of files that are read before they are needed, each of at most a block
PATHS_AT_ONCE = 256
FILES, MANIFEST, DIGESTS, BOOT = "files", "manifest", "digests", "boot"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CopyError(LockstepError):
    """A file cannot be read, or a copy cannot be written or used."""


class Entry(NamedTuple):
    """A file, folder or link: its path in the source, mode, bytes, times in nanoseconds, and a link's target."""

    path: str
    mode: int
    size: int
    modified: int
    changed: int
    target: str = ""


@dataclass(frozen=True)
class Manifest:
    """What a source contains, in the order of the paths; the path of the source itself is empty."""

    source: str
    entries: tuple[Entry, ...]

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(self._json).hexdigest()[:20]

    @property
    def files(self) -> list[Entry]:
        return [entry for entry in self.entries if stat.S_ISREG(entry.mode)]

    @cached_property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK_BYTES)

    @cached_property
    def _json(self) -> bytes:
        return json.dumps([self.source, self.entries]).encode()

    def pack(self) -> bytes:
        return zlib.compress(self._json, 1)

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """Return the manifest of `pack`.

        Raises:
            ValueError: The data are damaged.
        """
        try:
            source, entries = parse_json(zlib.decompress(data))
            return cls(source, tuple(Entry(*entry) for entry in entries))
        except (zlib.error, TypeError) as error:
            raise ValueError(str(error)) from None


def scan(source: str, left_out: Sequence[str] = ()) -> Manifest:
    """Return what a file or folder contains now.

    Links that lead out of it to a file count as that file. Sockets and devices are left out, and the paths `left_out`.

    Raises:
        CopyError: Something cannot be read.
    """
    root = os.path.realpath(source)
    with ThreadPoolExecutor(THREADS) as pool:
        paths, folders = [""], [""] if os.path.isdir(root) else []
        while folders:
            listings = pool.map(lambda folder: _listing(root, folder), folders)
            found = [each for listing in listings for each in listing if each[0] not in left_out]
            paths += [path for path, _ in found]
            folders = [path for path, is_folder in found if is_folder]
        parts = [paths[first : first + PATHS_AT_ONCE] for first in range(0, len(paths), PATHS_AT_ONCE)]
        described = pool.map(lambda part: [_entry(root, path) for path in part], parts)
        entries = [entry for part in described for entry in part if entry]
    return Manifest(source, tuple(sorted(entries)))


def _listing(root: str, folder: str) -> list[tuple[str, bool]]:
    try:
        with os.scandir(_at(root, folder)) as found:
            return [(os.path.join(folder, each.name), each.is_dir(follow_symlinks=False)) for each in found]
    except OSError as error:
        raise _unreadable(error, _at(root, folder)) from None


def _entry(root: str, path: str) -> Entry | None:
    whole = _at(root, path)
    try:
        status = os.lstat(whole)
        if stat.S_ISLNK(status.st_mode):
            target = os.path.normpath(os.path.join(os.path.dirname(whole), os.readlink(whole)))
            if f"{target}/".startswith(f"{root}/"):
                return Entry(path, status.st_mode, 0, 0, 0, os.path.relpath(target, os.path.dirname(whole)))
            if not os.path.isfile(whole):
                return Entry(path, status.st_mode, 0, 0, 0, target)
            status = os.stat(whole)
    except OSError as error:
        raise _unreadable(error, whole) from None
    if stat.S_ISDIR(status.st_mode):
        return Entry(path, status.st_mode, 0, 0, 0)
    if not stat.S_ISREG(status.st_mode):
        return None
    return Entry(path, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _at(root: str, path: str) -> str:
    return f"{root}/{path}" if path else root


def _unreadable(error: OSError, path: str) -> CopyError:
    return CopyError(f"{path} cannot be read: {error.strerror or error}")


def _unwritable(error: OSError, path: Path) -> CopyError:
    return CopyError(f"{path} cannot be written: {error.strerror or error}; choose a folder by --stage-dir")


def _parts(files: Sequence[Entry], first: int = 0) -> Iterator[tuple[Entry, int, int]]:
    """Yield the parts of files, from block `first` on, each with its offset and bytes, and within one block."""
    position, begin = 0, first * BLOCK_BYTES
    for entry in files:
        offset = max(0, begin - position)
        while offset < entry.size:
            length = min(entry.size - offset, BLOCK_BYTES - (position + offset) % BLOCK_BYTES)
            yield entry, offset, length
            offset += length
        position += entry.size


class Block(NamedTuple):
    """A block of a source's contents, with its digest."""

    data: bytes
    digest: bytes


def block_of(data: bytes) -> Block:
    return Block(data, hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest())


def read_blocks(root: str, manifest: Manifest, first: int = 0, is_copy: bool = False) -> Iterator[Block]:
    """Yield the blocks of the contents, from block `first` on.

    Args:
        is_copy: `root` is a copy, in which the files have other times.

    Raises:
        CopyError: A file has changed, or cannot be read.
    """
    waiting: deque[Future[bytes]] = deque()
    block = bytearray()
    with ThreadPoolExecutor(THREADS) as pool:
        parts = _parts(manifest.files, first)
        while True:
            while len(waiting) < AHEAD and (part := next(parts, None)):
                waiting.append(pool.submit(_read, root, *part, is_copy))
            if not waiting:
                break
            block += waiting.popleft().result()
            if len(block) == BLOCK_BYTES:
                yield block_of(bytes(block))
                block.clear()
    if block:
        yield block_of(bytes(block))


def _read(root: str, entry: Entry, offset: int, length: int, is_copy: bool) -> bytes:
    path = _at(root, entry.path)
    data = b""
    try:
        with open(path, "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            while len(data) < length and (more := os.pread(file.fileno(), length - len(data), offset + len(data))):
                data += more
            after = os.fstat(file.fileno())
    except OSError as error:
        raise _unreadable(error, path) from None
    expected = (entry.size, entry.modified, entry.changed)
    is_same = is_copy or all((each.st_size, each.st_mtime_ns, each.st_ctime_ns) == expected for each in (before, after))
    if len(data) < length or not is_same:
        raise CopyError(f"{path} has changed while it was copied; start again when nothing writes to it")
    return data


class Copies:
    """The copies in a folder of this host, which is created for this user alone.

    Raises:
        CopyError: The folder cannot be created, or belongs to somebody else.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._locks: dict[str, int] = {}
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            status = self.folder.lstat()
        except OSError as error:
            raise CopyError(f"{folder} cannot be created: {error.strerror}; choose a folder by --stage-dir") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise CopyError(f"{folder} is not a folder that only this user can write; choose another by --stage-dir")

    def close(self) -> None:
        """Release the copies that were held."""
        for lock in self._locks.values():
            os.close(lock)
        self._locks.clear()

    def path(self, source: str, key: str) -> str:
        """Return where the copy of a source is, or will be."""
        return str(self.folder / key / FILES / os.path.basename(source))

    def holds(self, key: str) -> bool:
        """Whether this process has found or made the complete copy."""
        return key in self._locks

    def find(self, source: str, key: str) -> bool:
        """Whether a copy is complete, and hold it if it is. Remove those of the same source that nobody holds.

        Raises:
            CopyError: It is damaged, and another job uses it.
        """
        for other in self.folder.iterdir():
            if other.name.partition(".")[0] != key and _source(other) == source and (lock := _lock(other)) is not None:
                shutil.rmtree(other, ignore_errors=True)
                os.close(lock)
        folder = self.folder / key
        if self.holds(key) or not folder.is_dir():
            return self.holds(key)
        if self.is_whole(source, key):
            return self._hold(folder)
        if (lock := _lock(folder)) is None:
            raise CopyError(f"{folder} is damaged, and another job uses it; choose another folder by --stage-dir")
        folder.rename(self._draft(key))
        os.close(lock)
        return False

    def is_whole(self, source: str, key: str) -> bool:
        """Whether a copy was completed since the machine was started, and all its files are still there."""
        folder = self.folder / key
        try:
            manifest = Manifest.unpack((folder / MANIFEST).read_bytes())
            has_booted = (folder / BOOT).read_text() != boot()
            return not has_booted and all(_is_there(self.path(source, key), entry) for entry in manifest.entries)
        except (OSError, ValueError):
            return False

    def _hold(self, folder: Path) -> bool:
        lock = _lock(folder, fcntl.LOCK_SH)
        if lock is not None:
            self._locks[folder.name] = lock
        return lock is not None

    def interrupted(self, key: str) -> Draft | None:
        """Return a copy that was interrupted, to go on with it."""
        for folder in self.folder.glob(f"{key}.new*"):
            if (lock := _lock(folder)) is not None:
                try:
                    return Draft(self, folder, Manifest.unpack((folder / MANIFEST).read_bytes()), lock)
                except (OSError, ValueError):
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)
        return None

    def begin(self, manifest: Manifest) -> Draft:
        """Return a new copy.

        Raises:
            CopyError: It cannot be written.
        """
        folder = self._draft(manifest.key)
        try:
            folder.mkdir()
            lock = _lock(folder)
            (folder / MANIFEST).write_bytes(manifest.pack())
            if lock is not None:
                return Draft(self, folder, manifest, lock)
        except OSError as error:
            raise _unwritable(error, folder) from None
        raise CopyError(f"{folder}: another process has locked it; start the job again")

    def _draft(self, key: str) -> Path:
        """Return a name for a copy that is not complete."""
        names = (self.folder / f"{key}.new{number}" for number in count())
        return next(name for name in names if not os.path.lexists(name))

    def finish(self, draft: Draft) -> None:
        """Make a complete draft the copy, unless another job was faster."""
        folder = self.folder / draft.manifest.key
        try:
            draft.folder.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(draft.folder, ignore_errors=True)
            self._hold(folder)
        else:
            fcntl.flock(draft.lock, fcntl.LOCK_SH)
            self._locks[folder.name] = draft.lock


class Draft:
    """A copy that is being written: its first `blocks` blocks are there."""

    def __init__(self, copies: Copies, folder: Path, manifest: Manifest, lock: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.lock = lock
        self._copies = copies
        self._root = str(folder / FILES / os.path.basename(manifest.source))
        self._make_folders()
        digests = (folder / DIGESTS).read_bytes() if (folder / DIGESTS).exists() else b""
        self.blocks = self._good_blocks(digests)
        (folder / DIGESTS).write_bytes(digests[: self.blocks * DIGEST_BYTES])
        self._rest = _parts(manifest.files, self.blocks)

    def _make_folders(self) -> None:
        os.makedirs(os.path.dirname(self._root), exist_ok=True)
        for entry in self.manifest.entries:
            path = _at(self._root, entry.path)
            if stat.S_ISDIR(entry.mode):
                os.makedirs(path, exist_ok=True)
            elif stat.S_ISLNK(entry.mode) and not os.path.lexists(path):
                os.symlink(entry.target, path)
            elif not entry.size and stat.S_ISREG(entry.mode):
                Path(path).touch()

    def _good_blocks(self, digests: bytes) -> int:
        good = 0
        with suppress(CopyError):  # a file is not there
            for block in read_blocks(self._root, self.manifest, is_copy=True):
                if block.digest != digests[good * DIGEST_BYTES : (good + 1) * DIGEST_BYTES]:
                    break
                good += 1
        return good

    def write(self, block: Block) -> None:
        """Add the next block.

        Raises:
            OSError: The disk is full, for example.
        """
        done = 0
        while done < len(block.data):
            entry, offset, length = next(self._rest)
            file = os.open(_at(self._root, entry.path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while length:
                    written = os.pwrite(file, block.data[done : done + length], offset)
                    done, offset, length = done + written, offset + written, length - written
            finally:
                os.close(file)
        with open(self.folder / DIGESTS, "ab") as digests:
            digests.write(block.digest)
        self.blocks += 1

    def finish(self) -> None:
        """Give the files their modes and times, and make this the copy.

        Raises:
            OSError: The disk is full, for example.
        """
        for entry in reversed(self.manifest.entries):  # a folder after its contents
            path = _at(self._root, entry.path)
            if stat.S_ISREG(entry.mode):
                os.truncate(path, entry.size)
                os.utime(path, ns=(entry.modified, entry.modified))
            if not stat.S_ISLNK(entry.mode):
                os.chmod(path, stat.S_IMODE(entry.mode) | (0o700 if stat.S_ISDIR(entry.mode) else 0o600))
        (self.folder / BOOT).write_text(boot())
        self._copies.finish(self)


def hold(path: str) -> int:
    """Keep other jobs from removing the copy at a path, until this process exits. Return the descriptor that does it.

    Raises:
        CopyError: It is not there.
    """
    folder = Path(path).parent.parent
    if (lock := _lock(folder, fcntl.LOCK_SH)) is None:
        raise CopyError(f"the copy {folder} is not there any more; start the job again")
    return lock


def boot() -> str:
    """Return an id of the machine's last start."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""


def _is_there(root: str, entry: Entry) -> bool:
    path = _at(root, entry.path)
    status = os.lstat(path)
    if stat.S_ISLNK(entry.mode):
        return os.readlink(path) == entry.target
    if not stat.S_ISREG(entry.mode) or entry.path.endswith(".pyc"):  # Python replaces a .pyc that is not current
        return stat.S_IFMT(status.st_mode) == stat.S_IFMT(entry.mode)
    same_second = status.st_mtime_ns // 10**9 == entry.modified // 10**9  # a file system may store no more
    return stat.S_ISREG(status.st_mode) and status.st_size == entry.size and same_second


def _source(folder: Path) -> str:
    """Return what a folder is a copy of; "" if it is no copy."""
    try:
        return Manifest.unpack((folder / MANIFEST).read_bytes()).source
    except (OSError, ValueError):
        return ""


def _lock(folder: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Return a descriptor of a folder that holds a lock; None if another process does, or there is no folder."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        if os.stat(folder).st_ino == os.fstat(lock).st_ino:
            return lock
    except OSError:  # held, or the folder was renamed in the meantime
        pass
    os.close(lock)
    return None
