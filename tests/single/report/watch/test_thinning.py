"""Curves of bounded size."""

from __future__ import annotations

import pytest

from lockstep.report.watch.metrics import Thinned


def test_few_points_are_kept_as_they_are() -> None:
    curve = Thinned(most=8)
    assert not curve
    for x in range(7):
        curve.add(x, 10 * x)
    assert curve.points == [(x, 10 * x) for x in range(7)]
    assert curve


@pytest.mark.parametrize("count", [8, 9, 100, 1000, 12_345])
def test_many_points_become_means_in_their_order_up_to_the_last(count: int) -> None:
    curve = Thinned(most=8)
    for x in range(count):
        curve.add(x, 3 * x + 1)
    xs = [x for x, _ in curve.points]
    assert 4 <= len(xs) <= 8
    assert xs == sorted(xs)
    assert all(y == pytest.approx(3 * x + 1) for x, y in curve.points)
    assert xs[0] < 0.2 * count
    assert xs[-1] > 0.7 * count
