"""Series out of records, also out of damaged ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scaling_jobs import published, record

from lockstep.report.scaling_series import (
    MeasuredPoint,
    cautions,
    contradict,
    efficiencies,
    judge,
    machine_of,
    series_of,
)


def test_repeats_become_one_point_with_median_and_quartiles() -> None:
    rates = (100.0, 120.0, 104.0, 108.0, 112.0)
    (series,), warnings = series_of([record(2, rate, repeat=repeat) for repeat, rate in enumerate(rates)])
    (point,) = series.points
    assert (point.workers, point.images_per_second, point.low, point.high) == (2, 108, 104, 112)
    assert not warnings


def test_points_are_sorted_and_modes_and_jobs_apart() -> None:
    records = [
        record(4, 40.0, "strong"),
        record(1, 10.0, modes=["strong", "weak"]),
        record(2, 19.0, "weak"),
        record(1, 99.0, "strong", job="another"),
    ]
    series, _ = series_of(records)
    found = [(one.mode, one.job, [point.workers for point in one.points]) for one in series]
    assert found == [("strong", "0badcafe", [1, 4]), ("weak", "0badcafe", [1, 2]), ("strong", "another", [1])]


def test_a_repeat_measured_again_counts_once_with_its_last_value() -> None:
    (series,), _ = series_of([record(1, 10.0), record(1, 30.0)])
    assert series.points[0].rates == (30.0,)


def test_what_a_step_consists_of_is_the_median_of_the_repeats() -> None:
    splits = [{"forward": 1.0, "communication_exposed": exposed} for exposed in (0.1, 0.3, 0.2)]
    records = [
        record(2, 10.0, repeat=repeat, split_seconds=split, global_batch=64) for repeat, split in enumerate(splits)
    ]
    (series,), _ = series_of(records)
    (point,) = series.points
    assert point.split == {"forward": 1.0, "communication_exposed": 0.2}
    assert point.global_batch == 64


def test_a_points_times_are_of_its_own_mode_machine_and_repeats() -> None:
    times = [(1, "A", 0, 99.0), (1, "A", 0, 10.0), (1, "A", 1, 12.0), (2, "A", 0, 6.0), (1, "B", 0, 100.0)]
    records = [
        record(workers, 10.0, gpu=gpu, repeat=repeat, step_seconds={"low": 0.0, "median": seconds / 100, "high": 9.0})
        for workers, gpu, repeat, seconds in times
    ]
    strong = record(1, 10.0, "strong", gpu="A", repeat=2, step_seconds=5.0)
    a, b, of_strong = series_of([*records, strong])[0]
    assert [point.step_seconds[1] for point in a.points] == pytest.approx([0.11, 0.06])
    assert a.points[0].step_seconds[2] == 9.0
    assert (b.points[0].step_seconds[1], of_strong.points[0].step_seconds) == (1.0, (None, 5.0, None))


def test_peak_memory_is_the_most_of_all_repeats() -> None:
    (series,), _ = series_of(
        record(2, 9.0, repeat=repeat, peak_memory_bytes=size) for repeat, size in enumerate((1, 5, 2))
    )
    assert series.points[0].peak_memory_bytes == 5


@pytest.mark.parametrize(
    ("fields", "machine"),
    [
        ({"device": "cpu", "environment": {"processor": "EPYC", "gpus": ["A100"]}}, "EPYC"),
        ({"device": "cuda", "environment": {"processor": "EPYC", "gpus": ["A100", "A100"]}}, "A100"),
        ({"gpu": "V100"}, "V100"),
        ({"device": "cuda", "environment": {"processor": "EPYC", "gpus": []}}, "EPYC"),
        ({"environment": {"gpus": [None], "processor": 3}}, ""),
    ],
)
def test_the_machine_is_the_model_of_what_computed(fields: dict[str, Any], machine: str) -> None:
    assert machine_of(fields) == machine


@pytest.mark.parametrize("split", ["forward", {"forward": "1"}, {"forward": -1.0}, {"forward": math.nan}, [1, 2]])
def test_a_damaged_split_is_omitted(split: object) -> None:
    (series,), _ = series_of([record(2, 10.0, split_seconds=split)])
    assert series.points[0].split is None


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"workers": 0}, "workers must be an integer of at least 1, got 0"),
        ({"workers": "4"}, "workers must be an integer of at least 1, got 4"),
        ({"workers": True}, "got True"),
        ({"workers": None}, "got None"),
        ({"workers": 10**30}, "workers must be"),
        ({"modes": "weak"}, 'modes must be a list of "strong" and "weak", got weak'),
        ({"modes": [["weak"]]}, "modes must be"),
        ({"modes": []}, "modes must be"),
        ({"images_per_second": 0}, "images_per_second must be a positive number, got 0"),
        ({"images_per_second": -3.5}, "got -3.5"),
        ({"images_per_second": math.nan}, "got nan"),
        ({"images_per_second": 1e19}, "got 1e+19"),
        ({"images_per_second": "fast\nvery"}, "got fast"),
        ({"images_per_second": {"median": 5}}, "images_per_second must be a positive number"),
        ({"images_per_second": 10**400}, "images_per_second must be a positive number"),
        (
            {"images_per_second": None},
            "no throughput; add a field NOUN_per_second, such as tokens_per_second or trainings_per_second",
        ),
        ({"failed": "worker 1 ended with exit code 1"}, "the run failed: worker 1 ended with exit code 1"),
    ],
)
def test_a_damaged_record_is_left_out_and_named(damage: dict[str, Any], named: str) -> None:
    (series,), (warning,) = series_of([record(1, 10.0), record(2, 19.0) | damage])
    assert [point.workers for point in series.points] == [1]
    assert warning.startswith("skipped scaling record 2")
    assert named in warning
    assert "\n" not in warning


def test_a_failed_run_that_was_repeated_leaves_no_gap() -> None:
    failed = {"kind": "scaling", "modes": ["weak"], "workers": 2, "job": "0badcafe", "failed": "out of memory"}
    _, warnings = series_of([failed | {"repeat": 0}, failed | {"repeat": 1}, record(2, 19.0, repeat=1)])
    assert warnings == ["skipped scaling record 1 (2 workers, repeat 0): the run failed: out of memory"]


def test_other_fields_may_hold_anything() -> None:
    names = ("job", "repeat", "nodes", "cores", "data", "arch", "precision", "compress", "device", "gpu", "source")
    names += ("global_batch", "batch", "peak_memory_bytes", "environment")
    for odd in (None, "x", -1, math.inf, [], {}, [[1]], {"gpus": [None], "processor": 3}, True):
        (series,), _ = series_of([record(2, 10.0) | dict.fromkeys(names, odd)])
        assert series.points[0].rates == (10.0,)


def test_records_of_other_kinds_are_passed_over() -> None:
    assert series_of([{"kind": "batch", "workers": 0}, {}]) == ([], [])


def test_more_workers_than_cores_on_cpus_are_oversubscribed() -> None:
    for workers, nodes, device, expected in (
        (2, 1, "cpu", False),
        (4, 1, "cpu", True),
        (4, 2, "cpu", False),
        (4, 1, "cuda", False),
    ):
        (series,), _ = series_of([record(workers, 10.0, cores=2, nodes=nodes, device=device)])
        assert series.points[0].oversubscribed is expected


def test_machines_are_apart_and_named_where_labels_are_the_same() -> None:
    series, _ = series_of(
        record(1, 10.0, device="cpu", arch="resnet18", environment={"processor": processor}) for processor in ("A", "B")
    )
    assert [one.label for one in series] == ["resnet18, A", "resnet18, B"]
    series, _ = series_of(record(1, 10.0, arch="resnet18", job=job) for job in ("1111", "2222"))
    assert [one.label for one in series] == ["resnet18, job 1111", "resnet18, job 2222"]


def test_records_with_labels_are_series_of_these_names() -> None:
    written = {"kind": "scaling", "modes": ["weak"], "workers": 1, "images_per_second": 9.0, "arch": "gpt2", "gpu": "A"}
    labels = ("GPT-2", "GPT-2 large", "", None)
    series, _ = series_of([written | {"label": label} for label in labels])
    assert [one.label for one in series] == ["GPT-2", "GPT-2 large", "gpt2, A"]
    series, _ = series_of([written | {"label": "GPT-2", "batch": batch} for batch in (8, 16)])
    assert [one.label for one in series] == ["GPT-2, batch 8 per worker", "GPT-2, batch 16 per worker"]


def test_any_noun_per_second_is_a_throughput_in_its_unit() -> None:
    written = {"kind": "scaling", "modes": ["weak"], "workers": 2}
    rates = [
        {"tokens_per_second": 9.0},
        {"audio_hours_per_second": 0.5, "steps_per_second": 3},
        {"samples_per_second": 4},
    ]
    series, warnings = series_of([written | rate for rate in rates])
    found = [(one.rate_unit, one.points[0].rates) for one in series]
    assert found == [("tokens/s", (9.0,)), ("audio hours/s", (0.5,)), ("samples/s", (4.0,))]
    assert len({one.label for one in series}) == 3
    assert not warnings


def test_records_with_the_same_fault_share_a_warning() -> None:
    records = [{"kind": "scaling", "modes": ["weak"], "workers": workers, "tokens_per_sec": 9.0} for workers in (1, 2)]
    _, (warning,) = series_of([*records, record(1, 10.0)])
    assert warning.startswith(
        "skipped scaling records 1 (1 worker), 2 (2 workers): no throughput; add a field NOUN_per"
    )


def test_a_label_says_what_the_job_is() -> None:
    facts = {"arch": "resnet18", "data": "cifar10", "precision": "bf16", "compress": "fp16", "gpu": "H200"}
    (strong, weak), _ = series_of([record(1, 10.0, modes=["strong", "weak"], global_batch=1024, batch=1024.0, **facts)])
    assert strong.label == "resnet18 on cifar10, global batch 1024, bf16, fp16 gradients, H200"
    assert weak.label == "resnet18 on cifar10, batch 1024 per worker, bf16, fp16 gradients, H200"


def test_the_published_series_are_as_published() -> None:
    series = published()
    rates = [point.images_per_second for point in series["imagenet"].points]
    assert rates == [2925, 5735, 10768, 20368, 37488]
    times = [1 / point.images_per_second for point in series["mnist"].points]
    assert times == pytest.approx([499.8, 283.9, 100.4, 58.8, 63.8, 55.7], rel=1e-5)
    assert [one.rate_unit for one in series.values()] == ["images/s", "samples/s", "trainings/s"]


def test_two_batches_of_one_job_are_two_series() -> None:
    def record(workers: int, global_batch: int, rate: float) -> dict[str, object]:
        about = {"kind": "scaling", "modes": ["strong"], "job": "01234567", "device": "cpu", "repeat": 0}
        batch = {"global_batch": global_batch, "batch": global_batch / workers}
        return {**about, **batch, "workers": workers, "images_per_second": rate}

    records = [record(1, 64, 200.0), record(2, 64, 390.0), record(1, 512, 300.0), record(2, 512, 590.0)]
    series, warnings = series_of(records)
    assert not warnings
    assert [[point.images_per_second for point in one.points] for one in series] == [[200.0, 390.0], [300.0, 590.0]]
    assert len({one.label for one in series}) == 2


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ({1: 100.0, 2: 180.0, 4: 290.0, 8: 620.0}, "The efficiency falls below 75 % at 4 workers."),
        ({1: 100.0, 2: 180.0, 4: 300.0}, "The efficiency is at least 75 % up to 4 workers."),
        ({2: 100.0, 4: 100.0}, "The efficiency falls below 75 % at 4 workers."),
        ({1: 100.0}, ""),
    ],
)
def test_the_first_inefficient_number_of_workers_is_named(rates: dict[int, float], verdict: str) -> None:
    assert judge([MeasuredPoint(workers, 1, (rate,)) for workers, rate in rates.items()], 0.75) == verdict


def test_efficiency_is_relative_to_the_smallest_number() -> None:
    assert efficiencies([MeasuredPoint(2, 1, (200.0,)), MeasuredPoint(4, 1, (300.0,))]) == {2: 1.0, 4: 0.75}


@pytest.mark.parametrize(
    ("mode", "kind", "counts", "problem"),
    [
        ("weak", "samples_per_step", {1: 64.0, 2: 126.0, 4: 256.0}, ""),
        (
            "weak",
            "samples_per_step",
            {1: 64.0, 2: 64.0},
            "The samples per step of a worker differ (64 with 1 worker, 32 with 2 workers), "
            "so this is not weak scaling (--mode strong: a program divides its global batch).",
        ),
        ("strong", "samples_per_step", {1: 64.0, 2: 63.5}, ""),
        (
            "strong",
            "samples_per_step",
            {1: 64.0, 2: 128.0},
            "The samples per step of all workers differ (64 with 1 worker, 128 with 2 workers), "
            "so this is not strong scaling.",
        ),
        ("weak", "samples_per_step", {}, ""),
        ("weak", "backward_passes", {1: 8.0, 2: 8.0}, ""),  # of unknown samples
        (
            "weak",
            "backward_passes",
            {1: 8.0, 2: 4.0},
            "The backward passes per step of a worker differ (8 with 1 worker, 4 with 2 workers), "
            "so this is not weak scaling (--mode strong: a program divides its global batch).",
        ),
        ("strong", "backward_passes", {1: 8.0, 2: 4.0}, ""),
        ("strong", "backward_passes", {1: 8.0, 2: 8.0}, ""),
    ],
)
def test_batches_that_contradict_the_mode_are_named(
    mode: str, kind: str, counts: dict[int, float], problem: str
) -> None:
    points = [MeasuredPoint(workers, 1, (9.0,), **{kind: count}) for workers, count in counts.items()]  # type: ignore[arg-type]
    assert contradict(mode, points) == problem


@pytest.mark.parametrize("field", ["steps_per_second", "iterations_per_second"])
def test_steps_of_weak_scaling_count_once_for_each_worker(field: str) -> None:
    records = [record(workers, None, modes=["strong", "weak"], **{field: 10.0}) for workers in (1, 2, 3)]
    strong, weak = series_of(records)[0]
    assert [point.images_per_second for point in weak.points] == [10.0, 20.0, 30.0]
    assert [point.images_per_second for point in strong.points] == [10.0, 10.0, 10.0]
    assert (strong.rate_unit, weak.rate_unit) == (f"{field.partition('_')[0]}/s", "worker-steps/s")


def test_repeats_that_disagree_have_no_verdict() -> None:
    points = [MeasuredPoint(1, 1, (100.0, 124.0)), MeasuredPoint(2, 1, (150.0, 195.0, 200.0))]
    assert judge(points, 0.75) == ""
    assert cautions("weak", points) == [
        "The repeats with 2 workers differ by 33 %: the machine was in use. Measure again, into another file (--out)."
    ]
    assert judge([points[0], MeasuredPoint(2, 1, (180.0, 200.0))], 0.75).startswith("The efficiency is at least 75 %")


def test_unlikely_efficiencies_and_missing_steps_are_named() -> None:
    points = [MeasuredPoint(1, 1, (100.0,)), MeasuredPoint(2, 1, (221.0,))]
    assert cautions("weak", points) == [
        "The efficiency is 110 % at 2 workers, which is rarely true: check the steps with 1 worker."
    ]
    assert cautions("weak", [points[0], MeasuredPoint(2, 1, (219.0,))]) == []
    records = [record(2, 10.0, steps=30, measured_steps=steps, repeat=repeat) for repeat, steps in enumerate((30, 7))]
    (series,), _ = series_of(records)
    assert cautions("weak", series.points) == [
        "Fewer steps than asked for were measured (7 with 2 workers), as the program ended."
    ]
