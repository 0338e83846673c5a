"""Copies of shared files on this host's disk, for `--stage`.

A copy is a folder with a name of two digests. The first one is of the source's path; the second one is of all paths,
sizes, times and modes in it, so a copy of what has changed since, even if only by `chmod`, is never used. It contains:

- `files`: the source's file or folder, which only an environment's workers may write to;
- `manifest`: what the source contains;
- `digests`: of each block of the contents, in the order of the manifest;
- `boot`: the machine's start during which it was made; what was not written to the disk before a crash is lost.

A copy that is being written has a longer name, and its writer holds an exclusive lock on it. If it is interrupted, it
goes on after its last good block. Jobs that use a copy hold a shared lock. A damaged copy, and copies of the same path
with another name, are removed if nobody holds them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.launch.plan.stage_options import BLOCK_BYTES

DISK_BYTES = 4096  # that even a small file takes
DIGEST_BYTES = 16
THREADS = 32  # on a network file system, a call takes long, but many are served at once
AHEAD = 2 * THREADS  # parts of files that are read before they are needed, each of at most a block
PATHS_AT_ONCE = 256
FILES, MANIFEST, DIGESTS, BOOT = "files", "manifest", "digests", "boot"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
UNFINISHED = re.compile(r"\.pyc\.\d+$")  # while Python writes a .pyc file


class CopyError(LockstepError):
    """A file cannot be read, or a copy cannot be written or used."""


class Entry(NamedTuple):
    """A file, folder or link: its path in the source, mode, bytes, times in nanoseconds, and a link's target."""

    path: str
    mode: int
    size: int = 0
    modified: int = 0
    changed: int = 0
    target: str = ""


@dataclass(frozen=True)
class CopyManifest:
    """What a source contains, in the order of the paths; the path of the source itself is empty.

    Args:
        root: The source's path, without links.
        left_out: Paths in it that are not copied.
        is_writable: Whether workers may write to the copy: Python stores bytecode in an environment.
    """

    root: str
    left_out: tuple[str, ...]
    is_writable: bool
    entries: tuple[Entry, ...]

    @cached_property
    def name(self) -> str:
        """The name of its copy."""
        about = json.dumps([self.root, self.left_out, self.is_writable]).encode()
        return f"{hashlib.sha256(about).hexdigest()[:12]}-{hashlib.sha256(self._json).hexdigest()[:20]}"

    @property
    def files(self) -> list[Entry]:
        return [entry for entry in self.entries if stat.S_ISREG(entry.mode)]

    @cached_property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(entry.size for entry in self.files)

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK_BYTES)

    @property
    def disk_bytes(self) -> int:
        """What the copy takes on a disk, approximately."""
        return sum((entry.size // DISK_BYTES + 1) * DISK_BYTES for entry in self.entries)

    @cached_property
    def _json(self) -> bytes:
        return json.dumps([self.root, self.left_out, self.is_writable, self.entries]).encode()

    def pack(self) -> bytes:
        return zlib.compress(self._json, 1)

    @classmethod
    def unpack(cls, data: bytes) -> CopyManifest:
        """Return the manifest of `pack`, which this user's process has written.

        Raises:
            ValueError: The data are damaged.
        """
        try:
            root, left_out, is_writable, entries = json.loads(zlib.decompress(data))
            return cls(root, tuple(left_out), is_writable, tuple(Entry(*entry) for entry in entries))
        except (zlib.error, TypeError) as error:
            raise ValueError(str(error)) from None


def scan(source: str, left_out: Sequence[str] = (), is_writable: bool = False) -> CopyManifest:
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
        entries = sorted(entry for part in described for entry in part if entry)
    if not entries or entries[0].path:
        raise CopyError(f"{source} does not exist, or is neither a file nor a folder")
    return CopyManifest(root, tuple(left_out), is_writable, tuple(entries))


def _listing(root: str, folder: str) -> list[tuple[str, bool]]:
    try:
        with os.scandir(_at(root, folder)) as found:
            all_of_them = [(os.path.join(folder, each.name), each.is_dir(follow_symlinks=False)) for each in found]
    except FileNotFoundError:  # removed in the meantime
        return []
    except OSError as error:
        raise _unreadable(error, _at(root, folder)) from None
    return [each for each in all_of_them if not UNFINISHED.search(each[0])]


def _entry(root: str, path: str) -> Entry | None:
    whole = _at(root, path)
    try:
        status = os.lstat(whole)
        if stat.S_ISLNK(status.st_mode):
            joined = os.path.join(os.path.dirname(whole), os.readlink(whole))
            target = os.path.join(os.path.realpath(os.path.dirname(joined)), os.path.basename(joined))
            if f"{target}/".startswith(f"{root}/"):
                return Entry(path, status.st_mode, target=os.path.relpath(target, os.path.dirname(whole)))
            if not os.path.isfile(whole):
                return Entry(path, status.st_mode, target=target)
            status = os.stat(whole)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(error, whole) from None
    if stat.S_ISDIR(status.st_mode):
        return Entry(path, status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        return None
    return Entry(path, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _at(root: str, path: str) -> str:
    return f"{root}/{path}" if path else root


def _unreadable(error: OSError, path: str) -> CopyError:
    return CopyError(f"{path} cannot be read: {error.strerror or error}")


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


def read_blocks(root: str, manifest: CopyManifest, first: int = 0, is_copy: bool = False) -> Iterator[Block]:
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
    # The time of the last change to the inode also changes if another environment links the file, as uv and conda do.
    expected = (entry.size, entry.modified)
    is_same = is_copy or all((each.st_size, each.st_mtime_ns) == expected for each in (before, after))
    if len(data) < length or not is_same:
        raise CopyError(f"{path} has changed while it was copied; start again when nothing writes to it")
    return data


class Copies:
    """The copies in a folder of this host, which is created for this user alone.

    Args:
        locks: Descriptors that hold the copies, by name, until this process exits.

    Raises:
        CopyError: The folder cannot be created, or belongs to somebody else.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.locks: dict[str, int] = {}
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            status = self.folder.lstat()
        except OSError as error:
            raise CopyError(f"{folder} cannot be created: {error.strerror}; choose a folder by --stage-dir") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise CopyError(f"{folder} is not a folder that only this user can write; choose another by --stage-dir")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from finding, beginning or removing copies."""
        lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def find(self, name: str) -> bool:
        """Whether a copy is complete, and hold it if it is. Remove others of the same source that nobody holds.

        Raises:
            CopyError: It is damaged, and another job uses it.
        """
        with self._alone():
            folder = self.folder / name
            if folder.is_dir():
                if is_whole(folder) and (lock := _lock(folder, fcntl.LOCK_SH)) is not None:
                    self.locks[name] = lock
                elif not _remove(folder):
                    raise CopyError(f"{folder} is damaged, and another job uses it; choose a folder by --stage-dir")
            is_found = name in self.locks
            for other in self.folder.glob(f"{name.partition('-')[0]}-*"):
                if other.name != name and (is_found or not other.name.startswith(f"{name}.")):
                    _remove(other)
            return is_found

    def unfinished(self, name: str) -> Draft | None:
        """Return a copy that was interrupted since the machine's start, to go on with it."""
        with self._alone():
            for folder in self.folder.glob(f"{name}.*"):
                if (lock := _lock(folder)) is not None:
                    with suppress(OSError, ValueError):
                        if (folder / BOOT).read_text() == boot():
                            return Draft(folder, CopyManifest.unpack((folder / MANIFEST).read_bytes()), lock)
                    os.close(lock)
                    _remove(folder)
        return None

    def begin(self, manifest: CopyManifest) -> Draft:
        """Return a new copy.

        Raises:
            OSError: It cannot be written.
        """
        with self._alone():
            folder = self.folder / f"{manifest.name}.{secrets.token_hex(4)}"
            folder.mkdir()
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / MANIFEST).write_bytes(manifest.pack())
        (folder / BOOT).write_text(boot())
        return Draft(folder, manifest, lock)

    def finish(self, draft: Draft) -> None:
        """Make a complete draft the copy, unless another job was faster.

        Raises:
            OSError: The disk is full, for example.
        """
        draft.set_modes()
        folder = self.folder / draft.manifest.name
        with self._alone():
            if folder.is_dir() and (lock := _lock(folder, fcntl.LOCK_SH)) is not None:
                draft.discard()
            else:
                draft.folder.rename(folder)
                fcntl.flock(lock := draft.lock, fcntl.LOCK_SH)
        self.locks[folder.name] = lock


class Draft:
    """A copy that is being written: its first `blocks` blocks are there."""

    def __init__(self, folder: Path, manifest: CopyManifest, lock: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.lock = lock
        self._root = files_of(folder, manifest)
        self._make_folders()
        digests = (folder / DIGESTS).read_bytes() if (folder / DIGESTS).exists() else b""
        self.blocks = _good_blocks(self._root, manifest, digests) if digests else 0
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

    def write(self, block: Block) -> None:
        """Add the next block.

        Raises:
            OSError: The disk is full, for example.
        """
        done = 0
        while done < len(block.data):
            entry, offset, length = next(self._rest)
            file = os.open(_at(self._root, entry.path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                while length:
                    written = os.pwrite(file, block.data[done : done + length], offset)
                    done, offset, length = done + written, offset + written, length - written
            finally:
                os.close(file)
        with open(self.folder / DIGESTS, "ab") as digests:
            digests.write(block.digest)
        self.blocks += 1

    def set_modes(self) -> None:
        """Give the files, which are complete, their modes and times."""
        for entry in reversed(self.manifest.entries):  # a folder after its contents
            path = _at(self._root, entry.path)
            if stat.S_ISREG(entry.mode):
                os.truncate(path, entry.size)
                os.utime(path, ns=(entry.modified, entry.modified))
            if not stat.S_ISLNK(entry.mode):
                mode = entry.mode & 0o777 | (0o500 if stat.S_ISDIR(entry.mode) else 0o400)
                os.chmod(path, mode | 0o200 if self.manifest.is_writable else mode & ~0o222)

    def discard(self) -> None:
        """Remove it, so that it does not keep a full disk full."""
        _delete(self.folder)


def files_of(folder: Path, manifest: CopyManifest) -> str:
    """Return where the file or folder is in a copy."""
    return str(folder / FILES / os.path.basename(manifest.root))


def _good_blocks(root: str, manifest: CopyManifest, digests: bytes) -> int:
    """Return how many blocks of a copy, from the first on, have these digests."""
    good = 0
    with suppress(CopyError):  # a file is not there
        for block in read_blocks(root, manifest, is_copy=True):
            if block.digest != digests[good * DIGEST_BYTES : (good + 1) * DIGEST_BYTES]:
                break
            good += 1
    return good


def is_whole(folder: Path) -> bool:
    """Whether a copy was made since the machine's start, and has all its files and, except an environment, no others.

    Contents are not compared: only this user can write to them.
    """
    try:
        if (folder / BOOT).read_text() != boot():
            return False
        manifest = CopyManifest.unpack((folder / MANIFEST).read_bytes())
        root = files_of(folder, manifest)
        if not all(_is_there(root, entry) for entry in manifest.entries):
            return False
        number = 1 + sum(len(folders) + len(files) for _, folders, files in os.walk(root))
        return manifest.is_writable or number == len(manifest.entries)
    except (OSError, ValueError):
        return False


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


def _remove(folder: Path) -> bool:
    """Remove a copy, unless a process holds it; return whether it is gone."""
    if (lock := _lock(folder)) is None:
        return not os.path.lexists(folder)
    _delete(folder)
    os.close(lock)
    return True


def _delete(folder: Path) -> None:
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Return a descriptor of a folder that holds a lock; None if another process does, or there is no folder."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
