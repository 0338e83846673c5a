"""Values of damaged and foreign files."""

from __future__ import annotations

import math

import pytest

from lockstep.watch.values import MOST, count, number, one_line


@pytest.mark.parametrize("value", [None, True, "1", [], {}, math.nan, math.inf, -math.inf, 10**400, -(10**400), 1e308])
def test_what_nobody_can_count_with_is_no_number(value: object) -> None:
    assert number(value) is None
    assert count(value) is None


def test_numbers_are_kept_and_counts_are_whole_not_negative_and_bounded() -> None:
    assert [number(value) for value in (0, -2, 0.5, 1e30)] == [0, -2, 0.5, 1e30]
    assert [count(value) for value in (0, 7, 7.9, MOST)] == [0, 7, 7, MOST]
    assert [count(value) for value in (-1, MOST + 1, 1e30)] == [None] * 3


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("naïve 図 ·", "naïve 図 ·"),
        ("a\x1b[2Jb\x9bc\x07", "a\ufffd[2Jb\ufffdc\ufffd"),
        ("a\nb\r\tc\u2028d", "a b  c d"),
        ("\u202eright to left", "\ufffdright to left"),
        ("bad name \udcff", "bad name \ufffd"),
        (7, ""),
        (None, ""),
    ],
)
def test_text_becomes_one_line_that_no_terminal_obeys(text: object, line: str) -> None:
    assert one_line(text) == line
