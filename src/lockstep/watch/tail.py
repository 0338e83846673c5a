"""Following a file of records that grows, line by line, without reading it again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.files.jsonl import parse_record
from lockstep.files.untrusted import open_plain

PORTION_BYTES = 16 << 20  # the view is drawn between two of them
SKIM_BYTES = 32 << 20  # of a longer file, which a day's training writes, only a part of the steps is parsed
STEP = b'{"kind": "step"'


class News(NamedTuple):
    """What was read.

    Args:
        is_new: The file is another one than at the last look, so that all records of before count no more.
        share: How much of the file has been read by now, from 0 to 1.
    """

    records: list[dict[str, Any]]
    is_new: bool = False
    share: float = 1.0


class Tail:
    """Reads what was appended since the last look.

    A resumed run puts another file in its place (`lockstep.files.jsonl.keep_records`): that is then read from its
    start.

    Args:
        last_bytes: Begin so many bytes before the end; None: at the start.
    """

    def __init__(self, path: Path, last_bytes: int | None = None):
        self._path, self._last_bytes = path, last_bytes
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self._every = 1  # which of the records of steps are parsed
        self._steps = 0

    def read(self, most_bytes: int = PORTION_BYTES) -> News:
        """The whole lines since the last look, up to `most_bytes` of them; none while there is no file."""
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
            return News([])
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half-written
        if not whole and len(data) == most_bytes:
            whole = data  # no record is as long as that: it is passed over
        self._offset += len(whole)
        lines = whole.splitlines()
        records = [record for line in self._chosen(lines) if (record := parse_record(line)) is not None]
        if len(data) < most_bytes:
            self._every = 1
            return News(records, is_new)
        return News(records, is_new, min(1.0, self._offset / status.size_bytes))

    def _chosen(self, lines: list[bytes]) -> Iterator[bytes]:
        """The lines to parse: all but, at the first reading of a long file, most of the steps."""
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
