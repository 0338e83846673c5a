"""Numbers and texts out of records that may be damaged or foreign: what cannot be used is None, never an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]  # of a file that may be damaged: any field may be missing or of another kind

LARGEST = 1e39  # no float of 32 bits is larger; a larger number is damage and would overflow in sums and products
LARGEST_WHOLE = 1e18  # larger ones have no place in NumPy's integers


def plausible(value: object) -> float | None:
    """A number to count with; None for all else: True and False, NaN, infinities, and what is too large."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return None
    return float(value)


def number(record: Record, *keys: str) -> float | None:
    """A number of a size that occurs; several keys lead into mappings within mappings."""
    return plausible(_at(record, keys))


def whole(record: Record, *keys: str) -> int | None:
    """A whole number of at most `LARGEST_WHOLE`."""
    value = number(record, *keys)
    return int(value) if value is not None and abs(value) <= LARGEST_WHOLE and value == int(value) else None


def count(record: Record, *keys: str) -> int | None:
    """A whole number that is not negative."""
    value = whole(record, *keys)
    return value if value is not None and value >= 0 else None


def text(record: Record, *keys: str) -> str | None:
    """Text that is not empty."""
    value = _at(record, keys)
    return value if isinstance(value, str) and value else None


def one_line(value: object) -> str:
    """A text in one line, in which nothing is left that a terminal would obey; empty for what is no text."""
    if not isinstance(value, str):
        return ""
    return "".join(sign if sign.isprintable() else " " if sign.isspace() else "\ufffd" for sign in value)


def mapping(record: Record, *keys: str) -> Mapping[str, Any]:
    """A mapping; an empty one where there is none."""
    value = _at(record, keys)
    return value if isinstance(value, Mapping) else {}


def rows(record: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The mappings in a list; an empty list where there is none."""
    value = record.get(key)
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def numbers(record: Record, key: str, length: int) -> list[float] | None:
    """A list of so many numbers."""
    value = record.get(key)
    if not isinstance(value, list) or len(value) != length:
        return None
    found = [each for item in value if (each := plausible(item)) is not None]
    return found if len(found) == length else None


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
