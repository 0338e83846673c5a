"""Points of a study: numbers of workers and batch sizes, and how they are measured."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.parse import parse_train
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError
from lockstep.study.loading import REPEATS, measure
from lockstep.study.points import (
    KEY,
    StepPoint,
    batch_flags,
    check_record_file,
    measured_flags,
    missing_points,
    next_size,
    plan_points,
)
from lockstep.train.optim.schedule import plan_batches

CONFIG = TrainConfig(batch_size=32)


def test_smallest_number_belongs_to_both_series_with_given_batch() -> None:
    points = plan_points(CONFIG, [4, 2], ("strong", "weak"), 1, seed=0)
    found = {(point.workers, point.global_batch): point.modes for point in points}
    assert found == {(2, 64): ("strong", "weak"), (4, 64): ("strong",), (4, 128): ("weak",)}


def test_each_repeat_has_every_point_once_in_an_order_of_its_own() -> None:
    points = plan_points(CONFIG, [1, 2, 3, 4, 5, 6], ("weak",), 3, seed=1)
    turns = [[point.workers for point in points if point.repeat == repeat] for repeat in range(3)]
    assert all(Counter(turn) == Counter(range(1, 7)) for turn in turns)
    assert points == plan_points(CONFIG, [6, 5, 4, 3, 2, 1], ("weak",), 3, seed=1)
    assert len({tuple(turn) for turn in turns}) == 3
    assert [point.repeat for point in points] == sorted(point.repeat for point in points)


def test_the_same_number_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be different numbers of workers"):
        plan_points(CONFIG, [2, 2], ("weak",), 1, seed=0)


@pytest.mark.parametrize("flags", [["-b", "16"], [], ["--global-batch-size", "64"], ["-b", "8", "--accumulate", "2"]])
def test_the_measured_job_has_the_batch_of_its_point(flags: list[str]) -> None:
    config = parse_train(["digits", *flags]).job
    for point in plan_points(config, [1, 2, 3], ("strong", "weak"), 1, seed=0):
        own = [*measured_flags(config, 35), *batch_flags(config, point.global_batch or 0)]
        measured = parse_train(["digits", *flags, *own]).job
        assert plan_batches(measured, point.workers).global_batch == point.global_batch
        assert (measured.run.track, measured.run.checkpoint_epochs, measured.epochs >= 37) == ((), 0, True)


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


def _search(limit: int, first: int, most: int | None) -> dict[int, bool]:
    found: dict[int, bool] = {}
    while (size := next_size(found, first, most)) is not None:
        assert size not in found
        assert size >= 1
        found[size] = size <= limit
        assert len(found) < 60
    return found


@given(limit=st.integers(1, 10**6), first=st.integers(1, 10**4))
def test_it_ends_within_a_sixteenth_of_the_largest_that_fits(limit: int, first: int) -> None:
    found = _search(limit, first, None)
    largest = max(size for size, fits in found.items() if fits)
    assert largest <= limit < largest + max(1, largest // 16) + 1
    assert any(not fits for fits in found.values())


@given(limit=st.integers(1, 10**4), first=st.integers(1, 100), more=st.integers(0, 1000))
def test_it_never_tries_more_than_the_most(limit: int, first: int, more: int) -> None:
    found = _search(limit, first, first + more)
    assert max(found) <= first + more
    if limit >= first + more:
        assert found[first + more]


def test_where_nothing_fits_it_ends_at_one() -> None:
    found = _search(0, 16, None)
    assert list(found) == [16, 8, 4, 2, 1]


def test_work_is_repeated_after_an_uncounted_warm_up() -> None:
    calls, waits = 0, list[int]()

    def work() -> int:
        nonlocal calls
        calls += 1
        time.sleep(1.0 if calls == 1 else 0.01)
        return 2

    rates = measure(work, 0.05, lambda: waits.append(calls))
    assert rates.low <= rates.median <= rates.high <= 2 / 0.01
    assert len(waits) == REPEATS
    assert waits[-1] == calls


def test_unwritable_file_is_reported_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        check_record_file(tmp_path / "file" / "loading.jsonl")
