"""Records: one JSON object a line, appended as the run goes on.

`metrics.jsonl` is the ground truth of a run; figures and reports read nothing else. Each record has `kind` ("run",
"step" or "epoch"), `step` (optimizer steps done) and `time_seconds` (of training, over all sessions of the run).
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

LONGEST_LINE = 16 << 20  # characters; the longest record, of a job of thousands of workers, has a hundredth of that


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one indented JSON object in place of `path`, whole or not at all, and sync it."""
    with replacing(path, durable=True) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def format_record(record: Mapping[str, Any]) -> str:
    """A record's line, without its end. NaN and infinities, which JSON lacks, are written as null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(finite)


class RecordWriter:
    """Appends records to a file, each whole and at once, so that a reader never waits for them.

    Raises:
        OSError: The file cannot be opened, or is a pipe that nothing reads, which would be waited for.
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
    """The record of a line; None where it holds no whole one."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Path, on_damage: Callable[[int], None] = lambda line: None) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a last line that a crash left half-written is passed over.

    Args:
        on_damage: Told the number of each line, from 1, that is neither empty nor a whole record.

    Raises:
        OSError: It cannot be read, or is a pipe or device.
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
    """The lines of a file; of one that no record can be, its beginning."""
    while line := file.readline(LONGEST_LINE):
        rest = line
        while len(rest) == LONGEST_LINE and not rest.endswith("\n"):
            rest = file.readline(LONGEST_LINE)
        yield line


def keep_records(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file with only the records that `keep` accepts, whole or not at all."""
    if not path.exists():
        return
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in read_records(path) if keep(record))
