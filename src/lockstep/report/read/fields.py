"""Fields of records that may be damaged: what is missing or of another type is None, never an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.files.jsonl import number_within

Record = Mapping[str, Any]  # of a file that may be damaged: any field may be missing or of another kind

LARGEST = 1e39  # no float of 32 bits is larger; a larger number is damage and would overflow in sums and products
LARGEST_WHOLE = 1e18  # larger ones have no place in NumPy's integers


def number(record: Record, *keys: str) -> float | None:
    """A number of a size that occurs; several keys lead into mappings within mappings."""
    value = number_within(_at(record, keys), LARGEST)
    return None if value is None else float(value)


def whole(record: Record, *keys: str) -> int | None:
    """A whole number of at most `LARGEST_WHOLE`."""
    value = number(record, *keys)
    return int(value) if value is not None and abs(value) <= LARGEST_WHOLE and value == int(value) else None


def text(record: Record, *keys: str) -> str | None:
    """Text that is not empty."""
    value = _at(record, keys)
    return value if isinstance(value, str) and value else None


def mapping(record: Record, *keys: str) -> Mapping[str, Any]:
    """A mapping; an empty one where there is none."""
    value = _at(record, keys)
    return value if isinstance(value, Mapping) else {}


def rows(record: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The mappings in a list; an empty list where there is none."""
    value = record.get(key)
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def numbers(record: Record, key: str, count: int) -> list[float] | None:
    """A list of so many numbers."""
    value = record.get(key)
    if not isinstance(value, list) or len(value) != count:
        return None
    found = [number_within(item, LARGEST) for item in value]
    return [float(item) for item in found if item is not None] if None not in found else None


def spread(record: Record, *keys: str) -> tuple[float, float, float] | None:
    """Lower quartile, median and upper quartile; a lone number is all three."""
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
