"""Write one shard of a pack, the task of one process. Without torch, so that processes start fast."""

from __future__ import annotations

import errno
import hashlib
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

from lockstep.data.packed.encode import Encoding
from lockstep.data.packed.pack_reader import BLOCK
from lockstep.data.process_pool import Advance
from lockstep.data.sets import MAX_IMAGE_BYTES
from lockstep.errors import CorruptImageError, DataError
from lockstep.files.atomic import replacing
from lockstep.files.jsonl import write_json
from lockstep.files.untrusted import read_bytes, read_json

LEFT_OUT = (errno.ENOENT, errno.EACCES, errno.ELOOP)  # the file's faults; other errors are temporary or the machine's


class Item(NamedTuple):
    """One image to pack: its file, the name of its members without extension, and its class number."""

    path: str
    key: str
    label: int


@dataclass(frozen=True)
class ShardTask:
    """One shard to write."""

    path: Path
    items: tuple[Item, ...]
    source: str  # a digest that changes with the items
    encoding: Encoding
    skip_corrupt: bool = False

    @property
    def record_path(self) -> Path:
        """Path of the shard's record, kept until the split's index is written."""
        return self.path.with_suffix(".json")


@dataclass(frozen=True)
class ShardRecord:
    """A written shard; `rows` are its rows in the index, (label, start, offset, length, crc) of each sample."""

    source: str
    size_bytes: int
    sha256: str
    rows: list[list[int]]
    left_out: list[str]

    @classmethod
    def of(cls, task: ShardTask) -> ShardRecord | None:
        """Read the record of a shard that is already written.

        Return None if it is missing, describes other files, or left out files although `skip_corrupt` is off.
        """
        try:
            record = cls(**read_json(task.record_path))
            same = record.source == task.source and task.path.stat().st_size == record.size_bytes
            return record if same and (task.skip_corrupt or not record.left_out) else None
        except (OSError, ValueError, TypeError):
            return None


def write_shard(task: ShardTask, advance: Advance) -> None:
    """Write a shard atomically, and sync it.

    Raises:
        DataError: The shard cannot be written, as on a full disk, or an image temporarily cannot be read.
        CorruptImageError: An image is missing, or cannot be decoded for re-encoding.
    """
    try:
        task.path.unlink(missing_ok=True)  # a shard of an earlier plan must not be paired with the new record
        with replacing(task.path, durable=True) as partial:
            with partial.open("wb") as file:
                record = _write_items(file, task, advance)
            write_json(task.record_path, asdict(record))  # ignored without its shard
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "free some space" if full else "fix this"
        raise DataError(
            f"{task.path} cannot be written ({error.strerror}); {fix} and run the same command again to resume"
        ) from None
    except MemoryError:
        raise DataError(f"out of memory at {task.path}; lower -j and run the same command again to resume") from None


def _write_items(file: BinaryIO, task: ShardTask, advance: Advance) -> ShardRecord:
    tar = _Tar(file)
    rows, left_out = [], []
    for item in task.items:
        try:
            content, extension = task.encoding.apply(_read(item.path), Path(item.path))
        except CorruptImageError:
            if not task.skip_corrupt:
                raise
            left_out.append(item.path)
        else:
            start, offset = tar.add(f"{item.key}.{extension}", content)
            tar.add(f"{item.key}.cls", b"%d" % item.label)
            rows.append([item.label, start, offset, len(content), crc32(content)])
        advance(1)
    tar.end()
    return ShardRecord(task.source, tar.size, tar.digest.hexdigest(), rows, left_out)


def _read(path: str) -> bytes:
    try:
        return read_bytes(Path(path), MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, OSError) and error.errno not in LEFT_OUT:
            raise DataError(
                f"{path} cannot be read ({reason}); fix this and run the same command again to resume"
            ) from None
        raise CorruptImageError(
            f"{path} cannot be read ({reason}); fix or remove it; `lockstep data pack --skip-corrupt` skips such files"
        ) from None


class _Tar:
    """A reproducible tar file (POSIX.1-2001), without times or owners."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.size, self.digest = 0, hashlib.sha256()

    def add(self, name: str, content: bytes) -> tuple[int, int]:
        """Append a file; return the offsets of its headers and its content."""
        member = tarfile.TarInfo(name)
        member.size = len(content)
        start = self.size
        self._write(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        offset = self.size
        self._write(content)
        self._write(bytes(-len(content) % BLOCK))
        return start, offset

    def end(self) -> None:
        self._write(bytes(2 * BLOCK))
        self._write(bytes(-self.size % tarfile.RECORDSIZE))

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self.digest.update(content)
        self.size += len(content)
