"""The model finds known parameters, its intervals hold what they say, and it meets the published series."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scaling_jobs import Job, published, record

from lockstep.errors import DataError
from lockstep.scaling_model import LEVEL, Model, Prediction, fit, series_of

DOUBLINGS = (1, 2, 4, 8, 16, 32)
PARTED = "a knee at 8 workers lies between this and fitted points"


def _values(model: Model) -> dict[str, float | None]:
    return {parameter.name: parameter.value for parameter in model.parameters}


def _interval(prediction: Prediction) -> tuple[float, float]:
    assert prediction.low is not None
    assert prediction.high is not None
    return prediction.low, prediction.high


def _status(model: Model, name: str) -> str:
    return next(parameter.status for parameter in model.parameters if parameter.name == name)


@pytest.mark.parametrize(
    "job",
    [
        Job("weak", compute=0.1, latency=0.004, bandwidth=0.03),
        Job("strong", compute=0.1, fixed=0.003, latency=0.001),
        Job("weak", compute=0.1, latency=0.004, bandwidth=0.03, overlap=0.6, split=True),
        Job("strong", compute=0.1, fixed=0.003, latency=0.002, bandwidth=0.01, overlap=0.6, split=True),
    ],
)
def test_known_parameters_are_found_and_more_workers_predicted(job: Job) -> None:
    model = fit(job.series(DOUBLINGS))
    expected = {"compute": job.compute, "latency": job.latency, "bandwidth": job.bandwidth}
    if job.mode == "strong":
        expected["fixed"] = job.fixed
    if job.split:
        expected["overlap"] = job.overlap
    per_image = 1 if job.split else 1 / 256  # without batches in the records, times are an image's
    for name, value in expected.items():
        assert _values(model)[name] == pytest.approx(value * (1 if name == "overlap" else per_image), abs=1e-9)
    for workers in (1, 64, 1000):
        assert model.predict(workers).images_per_second == pytest.approx(job.rate(workers), rel=1e-6)


def test_what_was_measured_is_said_to_be() -> None:
    model = fit(Job("strong", 0.1, 0.003, 0.002, 0.01, overlap=0.6, split=True).series(DOUBLINGS))
    assert {parameter.status.split(":")[0] for parameter in model.parameters} == {"measured"}
    (one, two) = fit(Job("strong", 0.1, 0.003, 0.002, 0.01, overlap=0.6, split=True).series((1, 2))).parameters[2:4]
    assert (one.name, one.status.split(":")[0]) == ("latency", "measured")
    assert (two.name, two.status) == ("bandwidth", "fixed: with one count above 1, included in latency")


@pytest.mark.parametrize(
    ("mode", "counts", "name", "status"),
    [
        ("weak", (4, 8, 16), "bandwidth", "fixed: separating it from latency needs 4 counts above 1, got 3"),
        ("weak", (1, 2, 4, 8, 16), "bandwidth", "fitted"),
        ("weak", (1, 2, 4, 8, 16), "fixed", "fixed: included in compute"),
        ("strong", DOUBLINGS, "bandwidth", "fixed: throughput alone cannot separate it"),
        ("strong", (1, 2), "fixed", "fixed: two points determine only two terms"),
        ("strong", (1, 2, 4), "fixed", "fitted"),
        ("strong", DOUBLINGS, "overlap", "fixed: throughput alone shows no hidden communication"),
    ],
)
def test_what_the_points_cannot_tell_is_fixed_and_stated(
    mode: str, counts: tuple[int, ...], name: str, status: str
) -> None:
    assert _status(fit(Job(mode, 0.1, 0.002, 0.004).series(counts)), name).startswith(status)


def test_points_of_which_some_lack_their_split_are_fitted_by_throughput() -> None:
    records = Job("weak", 0.1, latency=0.004, split=True).records((1, 2, 4))
    del records[1]["split_seconds"]
    model = fit(series_of(records)[0][0])
    assert _status(model, "compute") == "fitted"
    assert any("the fit uses only throughput" in remark for remark in model.remarks)
    assert model.predict(4).images_per_second == pytest.approx(Job("weak", 0.1, latency=0.004).rate(4))


def test_hidden_communication_costs_nothing() -> None:
    job = Job("weak", 0.1, latency=0.004, overlap=1.0, split=True)
    model = fit(job.series((1, 2, 4, 8), 0.02))
    assert _values(model)["overlap"] == 1
    assert model.predict(64).efficiency == pytest.approx(1, abs=0.05)
    low, high = _interval(model.predict(64))
    assert low < job.rate(64) < high


def test_workers_that_wait_for_each_other_are_remarked() -> None:
    model = fit(Job("weak", 0.1, latency=0.004, overlap=-0.5, split=True).series((1, 2, 4)))
    assert _values(model)["overlap"] == 0
    assert any("communication takes 1.50 times as long as the all-reduce alone" in remark for remark in model.remarks)


@pytest.mark.parametrize(
    ("job", "counts", "target"),
    [
        (Job("weak", 0.1, latency=0.005), (1, 2, 4, 8), 32),
        (Job("weak", 0.1, latency=0.005), (4, 8, 16), 64),
        (Job("strong", 0.1, 0.01, 0.002), (1, 2, 4, 8), 16),
    ],
)
def test_intervals_hold_new_measurements_as_often_as_they_say(job: Job, counts: tuple[int, ...], target: int) -> None:
    assert _coverage(job, counts, target) == pytest.approx(LEVEL, abs=0.06)


@pytest.mark.parametrize(
    "job",
    [
        Job("weak", 0.1),
        Job("weak", 0.1, latency=0.005, bandwidth=0.05, overlap=0.5, split=True),
        Job("strong", 0.1, 0.01, 0.002, 0.02, overlap=0.5, split=True),
    ],
)
def test_intervals_are_careful_with_terms_of_zero_and_measured_parts(job: Job) -> None:
    """Terms that end at 0 count as fitted, and the parts' noise is added: the interval holds somewhat more."""
    assert LEVEL - 0.03 <= _coverage(job, (1, 2, 4, 8), 32) <= 0.95


def _coverage(job: Job, counts: tuple[int, ...], target: int) -> float:
    """The share of simulated series whose interval holds a new measurement; the standard error is 0.02."""
    draws = np.random.default_rng(7)
    held = 0
    for _ in range(400):
        prediction = fit(job.series(counts, 0.02, draws)).predict(target)
        new = job.series((target,), 0.02, draws).points[0].images_per_second
        low, high = _interval(prediction)
        held += low <= new <= high
    return held / 400


def test_intervals_widen_away_from_the_points() -> None:
    model = fit(Job("weak", 0.1, latency=0.005).series((1, 2, 4, 8), 0.02))
    widths = [
        prediction.high / prediction.low
        for n in (4, 16, 64, 256)
        if (prediction := model.predict(n)).low and prediction.high
    ]
    assert len(widths) == 4
    assert widths == sorted(widths)


@pytest.mark.parametrize(("mode", "counts"), [("weak", (1, 2)), ("strong", (1, 2)), ("strong", (1, 2, 4))])
def test_as_many_parameters_as_points_give_no_interval(mode: str, counts: tuple[int, ...]) -> None:
    prediction = fit(Job(mode, 0.1, latency=0.004).series(counts, 0.02)).predict(16)
    assert (prediction.low, prediction.high) == (None, None)
    assert prediction.note == "no interval: as many parameters as points"


def test_a_step_is_never_shorter_than_its_communication() -> None:
    job = Job("strong", 1.0, latency=0.02, overlap=0.9, split=True)
    model = fit(job.series((1, 2, 4, 8)))
    assert model.predict(8).images_per_second == pytest.approx(job.rate(8))
    assert model.predict(256).images_per_second == pytest.approx(256 / (0.02 * 8))
    noisy = fit(job.series((1, 2, 4, 8), 0.02)).predict(256)
    low, high = _interval(noisy)
    assert low < noisy.images_per_second < high


def test_more_workers_than_the_global_batch_has_samples_are_named() -> None:
    model = fit(Job("strong", 1.0, latency=0.002, overlap=0.5, split=True).series((1, 2, 4, 8), 0.02))
    assert model.predict(256).note == ""
    assert model.predict(257).note == "unreliable: there are more workers than samples in the global batch (256)"


def test_an_interval_that_says_nothing_is_not_shown() -> None:
    prediction = fit(published()["cifar10"], (1, 2, 4, 8)).predict(8)
    assert prediction.low is not None
    rates = {1: 100.0, 2: 60.0, 4: 900.0}
    (series,), _ = series_of(record(workers, rate) for workers, rate in rates.items())
    assert fit(series).predict(4096).note == "no interval: it is wider than a factor of 10 to either side"


def test_throughput_stays_positive_and_finite_whatever_was_measured() -> None:
    draws = np.random.default_rng(3)
    for mode in ("strong", "weak"):
        for _ in range(200):
            counts = sorted({int(n) for n in draws.integers(1, 2000, size=5)})
            (series,), _ = series_of(record(n, float(10 ** draws.uniform(-3, 6)), mode) for n in counts)
            if len(counts) < 2:
                continue
            model = fit(series)
            for workers in (1, 7, 10_000_000):
                rate = model.predict(workers).images_per_second
                assert 0 < rate < math.inf


def test_leaving_one_out_predicts_each_point_from_the_others() -> None:
    job = Job("weak", 0.1, latency=0.005)
    series = job.series((1, 2, 4, 8), 0.02)
    errors = fit(series).leave_one_out
    assert [error.workers for error in errors] == [1, 2, 4, 8]
    for error in errors:
        alone = fit(series, [point.workers for point in series.points if point.workers != error.workers])
        assert error.predicted == pytest.approx(alone.predict(error.workers).images_per_second)
        assert error.relative_error == pytest.approx(error.predicted / error.measured - 1)
    assert all(abs(error.relative_error) < 1e-9 for error in fit(job.series((1, 2, 4, 8))).leave_one_out)
    assert fit(job.series((1, 2))).leave_one_out == []


def test_one_number_of_workers_is_refused_with_what_to_do() -> None:
    series = Job("weak", 0.1).series((4,), repeats=3)
    with pytest.raises(
        DataError, match=r"needs at least two numbers of workers, got only 4; measure more with `lockstep study"
    ):
        fit(series)


def test_points_that_were_not_measured_cannot_be_chosen() -> None:
    with pytest.raises(
        DataError, match="no measurements with 3 and 5 workers; measured numbers of workers: 1, 2 and 4"
    ):
        fit(Job("weak", 0.1).series((1, 2, 4)), (1, 3, 5))


def test_fewer_than_one_worker_is_no_prediction() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        fit(Job("weak", 0.1).series((1, 2))).predict(0)


def test_published_v100_throughput_is_met_from_its_first_three_points() -> None:
    model = fit(published()["imagenet"], (4, 8, 16))
    errors = {error.workers: error.relative_error for error in model.errors}
    assert abs(errors[32]) < 0.05
    assert abs(errors[64]) < 0.10
    for error in model.errors:
        low, high = _interval(model.predict(error.workers))
        assert low < error.measured < high
    assert model.remarks == ["fitted only to 4, 8 and 16 workers; the other points are for checking"]


@pytest.mark.parametrize(
    ("data", "above"), [("cifar10", "4 workers (1.08)"), ("mnist", "4 workers (1.24) and 8 workers (1.06)")]
)
def test_published_a100_series_have_super_linear_points_and_a_knee_that_are_not_fitted_away(
    data: str, above: str
) -> None:
    model = fit(published()[data])
    super_linear, knee = model.remarks
    assert super_linear.startswith(f"super-linear: efficiency is above 1 with {above}; throughput grows")
    assert "from 2 to 4 workers" in super_linear
    assert knee.startswith("knee at 8 workers, where a second node begins: from 8 to 16 workers, throughput falls")
    assert "to fit one side, use --from 1,2,4,8 or --from 16,32" in knee
    assert max(abs(error.relative_error) for error in model.errors) > 0.2
    for workers in (8, 16, 64):
        prediction = model.predict(workers)
        assert (prediction.low, prediction.note) == (None, f"unreliable: {PARTED}")


def test_one_side_of_a_knee_is_fitted_alone_and_not_trusted_on_the_other() -> None:
    series = published()["cifar10"]
    near, far = fit(series, (1, 2, 4, 8)), fit(series, (16, 32))
    assert (near.predict(8).note, near.predict(16).low) == ("", None)
    assert PARTED in near.predict(16).note
    assert PARTED not in far.predict(64).note
    assert 15_000 < far.predict(64).images_per_second < 20_000  # the plateau
