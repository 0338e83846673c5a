"""Super-linear points, knees and shared cores are seen where they are, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from scaling_jobs import Job, record

from lockstep.scaling_model import MeasuredPoint, series_of
from lockstep.scaling_model.shape import find_knee, remarks_of, super_linear


def _points(rates: dict[int, float | Sequence[float]], **more: object) -> tuple[MeasuredPoint, ...]:
    repeats = {workers: (rate,) if isinstance(rate, int | float) else rate for workers, rate in rates.items()}
    records = [
        record(workers, rate, repeat=repeat, **more)
        for workers, some in repeats.items()
        for repeat, rate in enumerate(some)
    ]
    (series,), _ = series_of(records)
    return series.points


def test_curves_that_the_model_makes_have_no_knee() -> None:
    for mode, fixed, latency, bandwidth in product(("strong", "weak"), *[(0.0, 0.01, 0.03, 0.1, 0.3, 1.0)] * 3):
        points = Job(mode, 1.0, fixed, latency, bandwidth).series((1, 2, 4, 8, 16, 32, 64, 128)).points
        assert find_knee(points) is None, (mode, fixed, latency, bandwidth)


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_a_sudden_end_of_growth_is_a_knee(mode: str) -> None:
    knee = find_knee(_points({1: 100, 2: 190, 4: 360, 8: 370, 16: 380}, modes=[mode]))
    assert knee is not None
    assert (knee.workers, knee.beyond, knee.cause) == (4, 8, "possibly at a node boundary")
    assert knee.growth == pytest.approx(370 / 360)


def test_the_step_to_a_second_node_is_a_knee_where_growth_breaks_off_less() -> None:
    rates = {1: 100.0, 2: 195.0, 4: 380.0, 8: 590.0}
    records = [record(workers, rate, nodes=max(1, workers // 4)) for workers, rate in rates.items()]
    (series,), _ = series_of(records)
    knee = find_knee(series.points)
    assert knee is not None
    assert (knee.workers, knee.cause) == (4, "where a second node begins")
    assert find_knee(_points(dict(rates))) is None


def test_where_cores_run_out_is_a_knee_and_the_points_are_remarked() -> None:
    points = _points({1: 100, 2: 190, 4: 195, 8: 180}, device="cpu", cores=2, nodes=1)
    knee = find_knee(points)
    assert knee is not None
    assert (knee.workers, knee.cause) == (2, "where workers begin to share cores")
    remarks = remarks_of(points, knee)
    assert any(remark.startswith("more workers than cores with 4 and 8 workers") for remark in remarks)
    assert any("--from 1,2 or --from 4,8" in remark for remark in remarks)


def test_efficiency_above_one_counts_beyond_the_spread_alone() -> None:
    assert [point.workers for point in super_linear(_points({1: 100, 2: 201, 4: 430}))] == [4]
    assert super_linear(_points({1: (90, 100, 110), 4: (380, 430, 480)})) == []


def test_steps_that_outgrow_the_workers_are_named() -> None:
    (remark,) = remarks_of(_points({1: 100, 2: 120, 4: 300, 8: 590}), None)
    assert remark.startswith("super-linear: throughput grows by a factor of 2.50 from 2 to 4 workers.")
    assert remarks_of(_points({1: 100, 2: 198, 4: 390}), None) == []
