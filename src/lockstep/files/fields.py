"""Typed access to records that may be damaged or foreign: unusable values become None, never an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
