"""Compare a command's output with a page: `...` matches anything, and numbers may differ slightly.

Losses differ in their last digits from one processor to the next, and times between any two runs. So numbers agree
within 2 % or 0.02, and those before a unit of time, rate or size always do.
"""

from __future__ import annotations

import math
import re

RELATIVE, ABSOLUTE = 0.02, 0.02
_NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?"
_ANY_UNIT = r" ?(?:[nµm]?s|min|h|[kKMG]i?B|B|images/s|samples/s|steps/s|[kKMG]i?B/s)(?![\w/])"
_PIECE = re.compile(
    rf"\.\.\.|(?<![\w.-])(?P<measured>{_NUMBER})(?={_ANY_UNIT})|(?<![\w.-])(?P<number>{_NUMBER})(?![\w])"
)


def difference(expected: str, printed: str) -> str | None:
    """Return the first line of `expected` that `printed` does not match, or None if all lines match."""
    wanted, got = _lines(expected), _lines(printed)
    furthest = _match(wanted, got)
    if furthest is None:
        return None
    return f"expected: {wanted[furthest]}" if furthest < len(wanted) else f"more was printed than {wanted[-1]!r}"


def _match(wanted: list[str], got: list[str]) -> int | None:
    """Return None, or the furthest line of `wanted` that no choice of matches for `...` lines gets past."""
    reached = {0}  # possible numbers of lines of `got` consumed so far
    for index, line in enumerate(wanted):
        if line == "...":
            reached = set(range(min(reached), len(got) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(got) and agree(line, got[at])}
        if not reached:
            return index
    return None if len(got) in reached else len(wanted)


def agree(expected: str, printed: str) -> bool:
    """Return whether a line matches the expected one."""
    pattern, numbers, position = "", [], 0
    for piece in _PIECE.finditer(expected):
        pattern += _words(expected[position : piece.start()])
        position = piece.end()
        if piece["number"]:
            numbers.append(_value(piece["number"]))
            pattern += f"({_NUMBER})"
        else:
            pattern += _NUMBER if piece["measured"] else ".*?"
    found = re.fullmatch(pattern + _words(expected[position:]), printed)
    return found is not None and all(
        math.isclose(wanted, _value(got), rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        for wanted, got in zip(numbers, found.groups(), strict=True)
    )


def _words(text: str) -> str:
    """Split a line into words, because columns may be padded for wider numbers."""
    return r"\s+".join(map(re.escape, re.split(r"\s+", text)))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _lines(text: str) -> list[str]:
    """Return the lines, without overwritten progress output, indentation and empty lines."""
    shown = (line.rsplit("\r", 1)[-1].strip() for line in text.splitlines())
    return [line for line in shown if line]
