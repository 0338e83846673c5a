"""Least squares without negative coefficients, and Student's t."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.scaling_model.least_squares import least_squares, t_quantile


def test_known_coefficients_are_found() -> None:
    rows = [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]
    values = [2.0 + 0.5 * row[1] for row in rows]
    fit = least_squares(rows, values, values)
    assert fit.coefficients == pytest.approx([2.0, 0.5])
    assert (fit.degrees, fit.noise) == (2, pytest.approx(0, abs=1e-20))


def test_no_coefficient_is_negative_and_the_rest_fits_best_without_it() -> None:
    rows = [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]
    values = [3.0, 2.0, 1.0]
    fit = least_squares(rows, values, [1.0, 1.0, 1.0])
    assert fit.coefficients == pytest.approx([2.0, 0.0])
    assert fit.noise == pytest.approx(2.0)
    assert fit.degrees == 1


def test_errors_count_in_proportion_to_the_scale() -> None:
    fit = least_squares([[1.0], [1.0]], [1.0, 10.0], [1.0, 10.0])
    assert fit.value([1.0]) == pytest.approx((1 + 1 / 10) / (1 + 1 / 100))


def test_as_many_columns_as_values_leave_no_variance() -> None:
    fit = least_squares([[1.0, 0.0], [1.0, 1.0]], [1.0, 2.0], [1.0, 1.0])
    assert (fit.noise, fit.variance([1.0, 5.0]), fit.degrees) == (None, None, 0)


def test_the_variance_is_that_of_many_fits() -> None:
    rows = [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]
    draws = np.random.default_rng(0)
    fits = [
        least_squares(rows, [4.0 + row[1] + 0.1 * draws.standard_normal() for row in rows], [1.0] * 4)
        for _ in range(2000)
    ]
    assert np.var([fit.value([1.0, 10.0]) for fit in fits]) == pytest.approx(
        np.mean([fit.variance([1.0, 10.0]) for fit in fits]), rel=0.1
    )


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [
        (0.8, 1, 3.0777),
        (0.8, 2, 1.8856),
        (0.95, 3, 3.1824),
        (0.95, 30, 2.0423),
        (0.99, 1000, 2.5808),
        (0.8, 1e6, 1.2816),
    ],
)
def test_quantiles_are_those_of_the_tables(level: float, degrees: float, expected: float) -> None:
    assert t_quantile(level, degrees) == pytest.approx(expected, rel=1e-3)
