from __future__ import annotations

import pytest

from lockstep.report.document import Chart, Line
from lockstep.report.ticks import binary_number, logarithmic, measured, number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.05, "0.05"),
        (97.5, "97.5"),
        (20368, "20,368"),
        (2.5e6, "2.5 M"),
        (3e9, "3 G"),
        (0.0003, "300 µ"),
        (9.9999999e-7, "1 µ"),
        (-1500, "-1,500"),
    ],
)
def test_numbers_of_an_axis_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_bytes_have_binary_prefixes() -> None:
    assert [binary_number(size) for size in (512, 65536, 2**20, 3 * 2**30)] == ["512", "64 Ki", "1 Mi", "3 Gi"]


def test_a_log2_axis_is_marked_at_the_worker_counts() -> None:
    chart = Chart("t", "", "workers", "", [Line("a", [1, 3, 6], [1, 2, 3]), Line("b", [1, 2], [1, 2])], x_scale="log2")

    assert measured(chart) == [1, 2, 3, 6]


def test_a_log2_axis_of_many_places_is_marked_at_powers_of_two() -> None:
    chart = Chart("t", "", "size (bytes)", "", [Line("a", [2**n for n in range(10, 29)], [1] * 19)], x_scale="log2")

    assert measured(chart) == []
    assert logarithmic(2**10, 2**28, "log2", is_bytes=True) == [2.0**power for power in range(10, 29, 3)]


def test_large_counts_on_a_log2_axis_are_marked_at_round_numbers() -> None:
    assert logarithmic(722, 5735, "log2", is_bytes=False) == [1000, 2000, 5000]


def test_many_decades_are_marked_at_powers_of_ten() -> None:
    assert logarithmic(0.001, 100, "log10", is_bytes=False) == pytest.approx([0.001, 0.01, 0.1, 1, 10, 100])
