"""Records: one JSON object per line, appended during the run.

`metrics.jsonl` is the source of truth for a run; figures and reports read only this file. Each record has `kind`
("run", "step" or "epoch"), `step` (optimizer steps done) and `time_seconds` (training time over all sessions).
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from lockstep.files.atomic import replacing
from lockstep.files.untrusted import open_plain, parse_json

LONGEST_LINE = 16 << 20  # characters; 100 times the longest record of a job with thousands of workers


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Atomically replace `path` by an indented JSON object, and sync it."""
    with replacing(path, durable=True) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def format_record(record: Mapping[str, Any]) -> str:
    """Return a record as a line without its newline. NaN and infinities, which JSON lacks, become null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(finite)


class RecordWriter:
    """Append records to a file, flushing after each.

    Raises:
        OSError: The file cannot be opened, or is a pipe without a reader.
    """

    def __init__(self, path: Path):
        self._file = open(path, "a", encoding="utf-8", opener=_open_at_once)  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        self._file.write(format_record(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _open_at_once(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def parse_record(line: str | bytes) -> dict[str, Any] | None:
    """Parse a line into a record; None if the line is not a complete record."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Path, on_damage: Callable[[int], None] = lambda line: None) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, skipping damaged lines, such as a last line cut short by a crash.

    Args:
        on_damage: Called with the number, from 1, of each line that is neither empty nor a complete record.

    Raises:
        OSError: The file cannot be read, or is a pipe or device.
    """
    try:
        content = open_plain(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    with io.TextIOWrapper(content, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(_lines(file), start=1):
            record = parse_record(line)
            if record is not None:
                yield record
            elif line.strip():
                on_damage(number)


def _lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file, truncated to `LONGEST_LINE`."""
    while line := file.readline(LONGEST_LINE):
        rest = line
        while len(rest) == LONGEST_LINE and not rest.endswith("\n"):
            rest = file.readline(LONGEST_LINE)
        yield line


def keep_records(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Atomically rewrite a file with only the records that `keep` accepts."""
    if not path.exists():
        return
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in read_records(path) if keep(record))
