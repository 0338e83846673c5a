from __future__ import annotations

import pytest

from lockstep.report.document import Chart, Line
from lockstep.report.draw.ticks import logarithmic, measured, number, numbers_of


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.05, "0.05"),
        (97.5, "97.5"),
        (20368, "20,368"),
        (2.5e6, "2.5 M"),
        (3e9, "3 G"),
        (0.0003, "0.0003"),
        (2e-5, "2e-5"),
        (-1500, "-1,500"),
    ],
)
def test_numbers_of_an_axis_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_bytes_have_binary_prefixes() -> None:
    numbers = numbers_of("size (bytes)")

    assert [number(size, numbers) for size in (512, 65536, 2**20, 3 * 2**30)] == ["512", "64 Ki", "1 Mi", "3 Gi"]


def test_short_times_have_prefixes() -> None:
    numbers = numbers_of("latency (s)")

    assert [number(time, numbers) for time in (0, 9.9999999e-7, 3e-4, 0.001, 2)] == ["0", "1 µ", "300 µ", "0.001", "2"]


def test_bytes_a_second_have_decimal_prefixes() -> None:
    assert number(2e9, numbers_of("bandwidth (bytes/s)")) == "2 G"


def test_a_log2_axis_is_marked_at_the_worker_counts() -> None:
    chart = Chart("t", "", "workers", "", [Line("a", [1, 3, 6], [1, 2, 3]), Line("b", [1, 2], [1, 2])], x_scale="log2")

    assert measured(chart) == [1, 2, 3, 6]


def test_a_log2_axis_of_many_places_is_marked_at_powers_of_two() -> None:
    chart = Chart("t", "", "size (bytes)", "", [Line("a", [2**n for n in range(10, 29)], [1] * 19)], x_scale="log2")

    assert measured(chart) == []
    assert logarithmic(2**10, 2**28, "log2", "bytes") == [2.0**power for power in range(10, 29, 3)]


def test_large_counts_on_a_log2_axis_are_marked_at_round_numbers() -> None:
    assert logarithmic(722, 5735, "log2", "plain") == [1000, 2000, 5000]


def test_many_decades_are_marked_at_powers_of_ten() -> None:
    assert logarithmic(0.001, 100, "log10", "plain") == pytest.approx([0.001, 0.01, 0.1, 1, 10, 100])


def test_a_short_logarithmic_axis_is_marked_at_round_numbers_too() -> None:
    assert logarithmic(1.8, 2.6, "log2", "plain") == pytest.approx([1.8, 2.0, 2.2, 2.4, 2.6])
