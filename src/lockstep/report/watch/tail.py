"""Follow a growing file of records without rereading it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.files.jsonl import parse_record
from lockstep.files.untrusted import open_plain

PORTION_BYTES = 16 << 20  # read at a time; the view is redrawn after each portion
SKIM_BYTES = 32 << 20  # in longer files, as after a day of training, only some step records are parsed
STEP = b'{"kind": "step"'


class NewRecords(NamedTuple):
    """Newly read records.

    Args:
        is_new: Whether the file was replaced since the last read; earlier records are then obsolete.
        share: Share of the file that has been read, from 0 to 1.
    """

    records: list[dict[str, Any]]
    is_new: bool = False
    share: float = 1.0


class FollowedFile:
    """Reads records appended to a file since the last read.

    A resumed run replaces the file (`lockstep.files.jsonl.keep_records`); the new file is then read from its start.

    Args:
        last_bytes: Start this many bytes before the end of the file; None to start at the beginning.
    """

    def __init__(self, path: Path, last_bytes: int | None = None):
        self._path, self._last_bytes = path, last_bytes
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self._every = 1  # every n-th step record is parsed
        self._steps = 0

    def read(self, most_bytes: int = PORTION_BYTES) -> NewRecords:
        """Return the records of complete new lines, reading up to `most_bytes`; empty while there is no file."""
        try:
            with open_plain(self._path) as file:
                status = _status(file.fileno())
                is_new = status.file_id != self._file_id or status.size_bytes < self._offset
                if is_new:
                    self._file_id = status.file_id
                    self._offset = max(0, status.size_bytes - self._last_bytes) if self._last_bytes else 0
                    self._every = 1 + (status.size_bytes - self._offset) // SKIM_BYTES
                file.seek(self._offset)
                data = file.read(most_bytes)
        except (OSError, ValueError):
            return NewRecords([])
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        if not whole and len(data) == most_bytes:
            whole = data  # too long for a record: skip it
        self._offset += len(whole)
        lines = whole.splitlines()
        records = [record for line in self._chosen(lines) if (record := parse_record(line)) is not None]
        if len(data) < most_bytes:
            self._every = 1
            return NewRecords(records, is_new)
        return NewRecords(records, is_new, min(1.0, self._offset / status.size_bytes))

    def _chosen(self, lines: list[bytes]) -> Iterator[bytes]:
        """Yield the lines to parse: all of them, except most step records on the first read of a long file."""
        for line in lines[:-1]:
            if self._every > 1 and line.startswith(STEP):
                self._steps += 1
                if self._steps % self._every:
                    continue
            yield line
        yield from lines[-1:]


class _Status(NamedTuple):
    file_id: tuple[int, int]
    size_bytes: int


def _status(descriptor: int) -> _Status:
    facts = os.fstat(descriptor)
    return _Status((facts.st_dev, facts.st_ino), facts.st_size)
