"""Following a file of records that grows, line by line, without reading it again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

PORTION_BYTES = 16 << 20  # half a second's reading: the view is drawn between two of them


class News(NamedTuple):
    """What was read.

    Args:
        is_new: The file is another one than at the last look, so that all records of before count no more.
        is_all: There is nothing left to read.
    """

    records: list[dict[str, Any]]
    is_new: bool = False
    is_all: bool = True


class Tail:
    """Reads what was appended since the last look.

    A resumed run puts another file in its place (`lockstep.records.keep_records`): that is then read from its start.

    Args:
        last_bytes: Begin so many bytes before the end; None: at the start.
    """

    def __init__(self, path: Path, last_bytes: int | None = None):
        self._path, self._last_bytes = path, last_bytes
        self._file_id: tuple[int, int] | None = None
        self._offset = 0

    def read(self, most_bytes: int = PORTION_BYTES) -> News:
        """The whole lines since the last look, up to `most_bytes` of them; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                status = _status(file.fileno())
                is_new = status.file_id != self._file_id or status.size_bytes < self._offset
                if is_new:
                    self._file_id = status.file_id
                    self._offset = max(0, status.size_bytes - self._last_bytes) if self._last_bytes else 0
                file.seek(self._offset)
                data = file.read(most_bytes)
        except OSError:
            return News([])
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half-written
        if not whole and len(data) == most_bytes:
            whole = data  # no record is as long as that: it is passed over
        self._offset += len(whole)
        records = [record for line in whole.splitlines() if (record := _parse(line)) is not None]
        return News(records, is_new, is_all=len(data) < most_bytes)


class _Status(NamedTuple):
    file_id: tuple[int, int]
    size_bytes: int


def _status(descriptor: int) -> _Status:
    facts = os.fstat(descriptor)
    return _Status((facts.st_dev, facts.st_ino), facts.st_size)


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line's record; None where a crash left half of one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
