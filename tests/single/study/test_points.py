"""The plan of a scaling study: which jobs, in which order, and which of them are recorded already."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import DataConfig, RunConfig, TrainConfig
from lockstep.errors import ConfigError
from lockstep.study.points import KEY, StepPoint, job_digest, missing_points, plan_points

CONFIG = TrainConfig(batch_size=32)


def test_smallest_number_belongs_to_both_series_with_given_batch() -> None:
    points = plan_points(CONFIG, [4, 2], ("strong", "weak"), 1, seed=0)
    found = {(point.workers, point.global_batch): point.modes for point in points}
    assert found == {(2, 64): ("strong", "weak"), (4, 64): ("strong",), (4, 128): ("weak",)}
    assert {point.config(CONFIG).global_batch_size for point in points if point.workers == 2} == {64}


def test_each_repeat_has_every_point_once_in_an_order_of_its_own() -> None:
    points = plan_points(CONFIG, [1, 2, 3, 4, 5, 6], ("weak",), 3, seed=1)
    turns = [[point.workers for point in points if point.repeat == repeat] for repeat in range(3)]
    assert all(Counter(turn) == Counter(range(1, 7)) for turn in turns)
    assert points == plan_points(CONFIG, [6, 5, 4, 3, 2, 1], ("weak",), 3, seed=1)
    assert len({tuple(turn) for turn in turns}) == 3
    assert [point.repeat for point in points] == sorted(point.repeat for point in points)


@pytest.mark.parametrize("counts", [[0], [2, 2], [-1, 1]])
def test_numbers_that_are_no_workers_are_refused(counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="must be different numbers of workers"):
        plan_points(CONFIG, counts, ("weak",), 1, seed=0)


def test_a_job_is_the_same_whatever_its_batch_and_its_folder() -> None:
    other = replace(CONFIG, batch_size=8, run=RunConfig(run_dir=Path("elsewhere"), log_every=1))
    assert job_digest(other) == job_digest(CONFIG)
    assert job_digest(replace(CONFIG, data=DataConfig(dataset="mnist"))) != job_digest(CONFIG)
    assert job_digest(replace(CONFIG, seed=1)) != job_digest(CONFIG)


ABOUT = {"job": "01234567", "nodes": 1, "threads": 1, "steps": 30, "warmup_steps": 5}


def _about(point: StepPoint) -> dict[str, Any]:
    return {**ABOUT, **point.to_mapping()}


def test_only_figures_of_the_same_measurement_count() -> None:
    points = plan_points(CONFIG, [2], ("weak",), 1, seed=0)
    record = {"kind": "scaling", **_about(points[0])}
    assert missing_points(points, _about, [record]) == []
    assert set(KEY) <= record.keys()
    others = [{**record, name: "other"} for name in KEY]
    assert missing_points(points, _about, [*others, {**record, "kind": "batch"}, {**record, "failed": "why"}]) == points


def test_point_of_one_series_is_measured_again_for_both() -> None:
    strong = plan_points(CONFIG, [1], ("strong",), 1, seed=0)
    both = plan_points(CONFIG, [1], ("strong", "weak"), 1, seed=0)
    records = [{"kind": "scaling", **_about(strong[0])}]
    assert missing_points(both, _about, records) == both
    records += [{"kind": "scaling", **_about(both[0])}]
    assert missing_points(both, _about, records) == missing_points(strong, _about, records) == []
