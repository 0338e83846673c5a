"""Values out of files that may be damaged or foreign: numbers to count with, and text that a terminal only shows."""

from __future__ import annotations

from lockstep.files.jsonl import number_within

LARGEST = 1e100  # sums and products of such numbers are finite
MOST = 10**15  # far more steps, images or parameters than there are


def number(value: object) -> float | None:
    """A number to count with; None for all else, also for NaN, infinities and what is too large."""
    return number_within(value, LARGEST)


def count(value: object) -> int | None:
    """A number of things, from 0 to `MOST`; a fraction is dropped. None for all else."""
    found = number(value)
    return int(found) if found is not None and 0 <= found <= MOST else None


def one_line(value: object) -> str:
    """A text in one line, in which nothing is left that a terminal would obey; empty for what is no text."""
    if not isinstance(value, str):
        return ""
    return "".join(sign if sign.isprintable() else " " if sign.isspace() else "\ufffd" for sign in value)
