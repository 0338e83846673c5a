"""The model finds known terms, its intervals hold what they promise, and it predicts the published series."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scaling_jobs import Job, published, record

from lockstep.errors import DataError
from lockstep.report.scaling_model import LEVEL, Prediction, fit
from lockstep.report.scaling_series import series_of

DOUBLINGS = (1, 2, 4, 8, 16, 32)


def _interval(prediction: Prediction) -> tuple[float, float]:
    return prediction.low, prediction.high


@pytest.mark.parametrize(
    "job",
    [
        Job("weak", compute=0.1, latency=0.004, bandwidth=0.03),
        Job("strong", compute=0.1, latency=0.001, bandwidth=0.02),
        Job("weak", compute=0.1),
    ],
)
@pytest.mark.parametrize("counts", [DOUBLINGS, (4, 8, 16)])
def test_fit_finds_known_terms(job: Job, counts: tuple[int, ...]) -> None:
    model = fit(job.series(counts))
    assert model.terms == pytest.approx([job.compute / 256, job.bandwidth / 256, job.latency / 256], abs=1e-9)
    for workers in (1, 64, 1000):
        assert model.predict(workers).images_per_second == pytest.approx(job.rate(workers), rel=1e-6)


def test_fixed_work_of_strong_scaling_is_fitted() -> None:
    job = Job("strong", compute=0.1, fixed=0.01, latency=0.001)
    model = fit(job.series(DOUBLINGS))
    assert model.terms[:2] == pytest.approx([0.11 / 256, 0.01 / 256])  # (n - 1)/n is a constant minus 1/n
    assert model.predict(512).images_per_second == pytest.approx(job.rate(512))


def test_no_term_is_negative() -> None:
    rates = {1: 100.0, 2: 220.0, 4: 500.0}
    (series,), _ = series_of(record(workers, rate) for workers, rate in rates.items())
    model = fit(series)
    assert model.terms[0] > 0
    assert model.terms[1:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("job", "counts", "target"),
    [
        (Job("weak", 0.1, latency=0.02, bandwidth=0.1), DOUBLINGS, 64),
        (Job("strong", 0.1, latency=0.01, bandwidth=0.1), (1, 2, 4, 8), 16),
    ],
)
def test_intervals_contain_their_share_of_new_measurements(job: Job, counts: tuple[int, ...], target: int) -> None:
    assert _coverage(job, counts, target, repeats=1) == pytest.approx(LEVEL, abs=0.06)
    assert LEVEL - 0.03 <= _coverage(job, counts, target, repeats=5) <= 0.95  # a median deviates less than one repeat


@pytest.mark.parametrize(
    ("job", "counts"), [(Job("weak", 0.1, latency=0.005, bandwidth=0.03), (4, 8, 16)), (Job("weak", 0.1), (1, 2, 4, 8))]
)
def test_intervals_are_not_too_narrow_for_terms_near_zero(job: Job, counts: tuple[int, ...]) -> None:
    assert _coverage(job, counts, 32, repeats=1) >= LEVEL


def _coverage(job: Job, counts: tuple[int, ...], target: int, repeats: int) -> float:
    """Return how many of 400 simulated series' intervals hold a new measurement; the standard error is 0.02."""
    draws = np.random.default_rng(7)
    noise = 0.02 if repeats == 1 else 0.06  # one measurement shows no spread, so 2 % is assumed
    held = 0
    for _ in range(400):
        prediction = fit(job.series(counts, noise, draws, repeats)).predict(target)
        new = job.series((target,), noise, draws).points[0].images_per_second
        low, high = _interval(prediction)
        held += low <= new <= high
    return held / 400


def test_intervals_widen_away_from_points() -> None:
    model = fit(Job("weak", 0.1, latency=0.005).series((1, 2, 4, 8), 0.02))
    widths = [high / low for low, high in (_interval(model.predict(n)) for n in (4, 16, 64, 256))]
    assert widths == sorted(widths)


def test_intervals_widen_with_spread_of_repeats() -> None:
    widths = []
    for spread in (0.0, 0.01, 0.1):
        repeats = [(n, i, n * (100 + 100 * spread * i)) for n in (1, 2, 4) for i in (-1, 0, 1)]
        (series,), _ = series_of(record(n, rate, repeat=i) for n, i, rate in repeats)
        low, high = _interval(fit(series).predict(8))
        widths.append(math.log(high / low))
    assert widths == pytest.approx([widths[0], widths[0], 5 * widths[0]])  # less than 2 % counts as 2 %


def test_very_wide_interval_is_not_reported() -> None:
    rates = {1: 100.0, 2: 60.0, 4: 900.0}
    (series,), _ = series_of(record(workers, rate) for workers, rate in rates.items())
    prediction = fit(series).predict(4096)
    assert (prediction.low, prediction.high) == (None, None)
    assert prediction.note == "no interval: it is wider than a factor of 10 to either side"


def test_more_workers_than_global_batch_are_unreliable() -> None:
    records = [one | {"global_batch": 16} for one in Job("strong", 1.0, latency=0.002).records((1, 2, 4, 8))]
    model = fit(series_of(records)[0][0])
    assert model.predict(16).note == ""
    assert model.predict(17).note == "unreliable: there are more workers than samples in the global batch (16)"


def test_more_workers_than_cores_are_reported() -> None:
    more: dict[str, Any] = {"device": "cpu", "cores": 2, "nodes": 1}
    (series,), _ = series_of(record(n, rate, **more) for n, rate in {1: 100, 2: 190, 4: 195, 8: 180}.items())
    (remark,) = fit(series).remarks
    assert remark.startswith("more workers than cores with 4 and 8 workers: ")


def test_throughput_is_positive_and_finite_for_any_points() -> None:
    draws = np.random.default_rng(3)
    for mode in ("strong", "weak"):
        for largest in [2000] * 200 + [9_000_000] * 20:
            counts = sorted({int(n) for n in draws.integers(largest // 2000, largest, size=5)})
            (series,), _ = series_of(record(n, float(10 ** draws.uniform(-3, 6)), mode) for n in counts)
            model = fit(series)
            for workers in (1, 7, 10_000_000):
                assert 0 < model.predict(workers).images_per_second < math.inf


def test_fewer_than_three_counts_are_refused() -> None:
    series = Job("weak", 0.1).series((4, 8), repeats=3)
    expected = r"needs at least 3 numbers of workers, got only 4 and 8; measure more with `lockstep study scaling --np`"
    with pytest.raises(DataError, match=expected):
        fit(series)


def test_counts_that_were_not_measured_are_refused() -> None:
    expected = "no measurements with 3 and 5 workers; measured numbers of workers: 1, 2 and 4"
    with pytest.raises(DataError, match=expected):
        fit(Job("weak", 0.1).series((1, 2, 4)), (1, 3, 5))


def test_published_v100_series_is_predicted_from_three_points() -> None:
    model = fit(published()["imagenet"], (4, 8, 16))
    limits = {32: 0.05, 64: 0.10}
    for point in model.series.points:
        prediction = model.predict(point.workers)
        low, high = _interval(prediction)
        assert low < point.images_per_second < high
        assert abs(prediction.images_per_second / point.images_per_second - 1) < limits.get(point.workers, 1)
    assert model.remarks == ["fitted only to 4, 8 and 16 workers; the other points are for checking"]


@pytest.mark.parametrize("data", ["cifar10", "mnist"])
def test_interval_includes_deviations_from_the_model(data: str) -> None:
    """Throughput of these series grows faster than the workers up to 8 GPUs, and not at all beyond them."""
    model = fit(published()[data])
    assert model.largest_error > 0.2
    for point in model.series.points:
        low, high = _interval(model.predict(point.workers))
        assert low < point.images_per_second < high
        assert high > 1.8 * low
