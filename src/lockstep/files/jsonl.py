"""Records: one JSON object per line, appended during the run, and typed access to their fields.

`metrics.jsonl` is the source of truth for a run; figures and reports read only this file. Each record has `kind`
("run", "step" or "epoch"), `step` (optimizer steps done) and `time_seconds` (training time over all sessions). Records
may be damaged or foreign: unusable values become None, never an error.
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


Record = Mapping[str, Any]  # any field may be missing or have the wrong type

LARGEST = 1e39  # above the largest 32-bit float; larger values are damage and overflow in products
LARGEST_WHOLE = 1e18  # larger ones do not fit into NumPy's int64


def plausible(value: object) -> float | None:
    """Return a finite number up to `LARGEST` as a float; None for anything else, including booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return None
    return float(value)


def number(record: Record, *keys: str) -> float | None:
    """Return a field as a float, as `plausible` does; several keys index nested mappings."""
    return plausible(_at(record, keys))


def whole(record: Record, *keys: str) -> int | None:
    """Return an integer of magnitude at most `LARGEST_WHOLE`."""
    value = number(record, *keys)
    return int(value) if value is not None and abs(value) <= LARGEST_WHOLE and value == int(value) else None


def count(record: Record, *keys: str) -> int | None:
    """Return a non-negative integer."""
    value = whole(record, *keys)
    return value if value is not None and value >= 0 else None


def text(record: Record, *keys: str) -> str | None:
    """Return a non-empty string."""
    value = _at(record, keys)
    return value if isinstance(value, str) and value else None


def texts(record: Record, key: str) -> list[str]:
    """Return the strings in a list field; an empty list if the field is not a list."""
    value = record.get(key)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def one_line(value: object) -> str:
    """Return a string as one line without control characters; "" for anything else."""
    if not isinstance(value, str):
        return ""
    return "".join(sign if sign.isprintable() else " " if sign.isspace() else "\ufffd" for sign in value)


def mapping(record: Record, *keys: str) -> Mapping[str, Any]:
    """Return a mapping; an empty one if the field is not a mapping."""
    value = _at(record, keys)
    return value if isinstance(value, Mapping) else {}


def rows(record: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the mappings in a list field; an empty list if the field is not a list."""
    value = record.get(key)
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def numbers(record: Record, key: str, length: int) -> list[float] | None:
    """Return a list of exactly `length` numbers."""
    value = record.get(key)
    if not isinstance(value, list) or len(value) != length:
        return None
    found = [each for item in value if (each := plausible(item)) is not None]
    return found if len(found) == length else None


def counts(record: Record, key: str, most: int) -> list[int] | None:
    """Return a list of up to `most` non-negative integers."""
    value = record.get(key)
    if not isinstance(value, list) or len(value) > most:
        return None
    found = [each for item in value if (each := count({key: item}, key)) is not None]
    return found if len(found) == len(value) else None


def spread(record: Record, *keys: str) -> tuple[float, float, float] | None:
    """Return (lower quartile, median, upper quartile); a single number stands for all three."""
    alone = number(record, *keys)
    if alone is not None:
        return alone, alone, alone
    low, median, high = (number(record, *keys, part) for part in ("low", "median", "high"))
    if median is None:
        return None
    return median if low is None else low, median, median if high is None else high


def _at(record: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
