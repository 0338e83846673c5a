"""Curves, their thinning, and the lines drawn from them."""

from __future__ import annotations

import math

import pytest

from lockstep.report.run import Curve, averages
from lockstep.report.run_lines import EPOCHS, RunCurve, lines, points_a_line, time_unit


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


def test_values_that_are_not_finite_become_gaps() -> None:
    (line,) = lines([RunCurve(0, "a", _curve([0.5, math.nan, math.inf]))], EPOCHS, 100)
    assert (line.x, line.y) == ([0, 1, 2], [50, None, None])


def test_many_lines_have_fewer_points_each_but_enough() -> None:
    assert (points_a_line(1), points_a_line(100), points_a_line(10_000)) == (2_000, 200, 200)


def test_the_unit_of_time_suits_the_longest() -> None:
    assert [time_unit(seconds)[1] for seconds in (0, 299, 300, 10_799, 10_800)] == ["s", "s", "min", "min", "h"]
