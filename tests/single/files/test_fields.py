"""Fields of records that may be damaged."""

from __future__ import annotations

import math

import pytest

from lockstep.files.fields import count, counts, number, one_line, spread, whole


@pytest.mark.parametrize("value", [None, True, "1", [1], math.nan, math.inf, 10**400, -(10**400), 1e300])
def test_invalid_or_absurd_number_gives_none(value: object) -> None:
    assert number({"a": {"b": value}}, "a", "b") is None
    assert whole({"a": value}, "a") is None
    assert count({"a": value}, "a") is None
    assert spread({"a": {"median": value}}, "a") is None


def test_numbers_are_ones_that_numpy_can_hold() -> None:
    assert isinstance(number({"a": 10**30}, "a"), float)
    assert whole({"a": 10**30}, "a") is None
    assert (whole({"a": 8.0}, "a"), whole({"a": 8.5}, "a")) == (8, None)
    assert (whole({"a": -3}, "a"), count({"a": -3}, "a"), count({"a": 0}, "a")) == (-3, None, 0)


@pytest.mark.parametrize(
    "value", [None, 3, "12", {}, [1, -1], [1.5], [True], [[1]], [10**400], [math.nan], [1, 2, 3, 4]]
)
def test_a_list_of_counts_is_whole_or_none(value: object) -> None:
    assert counts({"a": value}, "a", most=3) is None
    assert counts({"a": [2, 0, 1.0]}, "a", most=3) == [2, 0, 1]


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
