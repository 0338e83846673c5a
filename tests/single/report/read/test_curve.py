"""Curves and their thinning."""

from __future__ import annotations

import math

import pytest

from lockstep.report.read.curve import Curve, averages, drawn, points_a_line, time_unit


def _curve(values: list[float]) -> Curve:
    steps = [float(step) for step in range(len(values))]
    return Curve(steps, steps, steps, values)


def test_short_curves_stay_as_they_are() -> None:
    curve = _curve([1.0, 2.0])
    assert curve.thinned(2) is curve


def test_thinning_averages_stretches_and_keeps_the_mean() -> None:
    thin = _curve([float(value) for value in range(1_000)]).thinned(10)
    assert thin.values == pytest.approx([49.5 + 100 * index for index in range(10)])
    assert thin.steps == thin.values


@pytest.mark.parametrize("limit", [1, 3, 7, 100, 999])
def test_no_point_is_left_out_of_the_averages(limit: int) -> None:
    assert len(averages([1.0] * 1_000, limit)) == limit
    assert averages([1.0] * 1_000, limit) == [1.0] * limit


def test_a_value_without_a_number_does_not_spoil_a_stretch() -> None:
    assert averages([1.0, math.nan, math.nan, math.nan], 2)[0] == 1.0
    assert math.isnan(averages([1.0, math.nan, math.nan, math.nan], 2)[1])


def test_changes_keep_the_ends_and_both_sides_of_each_change() -> None:
    assert list(_curve([1.0, 1, 1, 2, 2, 2, math.nan]).changes().steps) == [0, 2, 3, 5]


def test_gaps_are_none_and_other_values_are_short() -> None:
    assert drawn([1 / 3, math.nan, math.inf], 100) == [33.3333, None, None]


def test_many_lines_have_fewer_points_each_but_enough() -> None:
    assert (points_a_line(1), points_a_line(100), points_a_line(10_000)) == (2_000, 200, 200)


def test_the_unit_of_time_suits_the_longest() -> None:
    assert [time_unit(seconds)[1] for seconds in (0, 299, 300, 10_799, 10_800)] == ["s", "s", "min", "min", "h"]
