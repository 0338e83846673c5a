"""Run folders as the report reads them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from report_material import ENVIRONMENT, epoch_record, make_run, run_records, start_record, step_record

from lockstep.report.run import Run
from lockstep.report.sources import read_run


def _read(folder: Path) -> tuple[Run, list[str]]:
    warnings: list[str] = []
    run = read_run(folder / "metrics.jsonl", warnings.append)
    return run, warnings


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    run, warnings = _read(make_run(tmp_path / "run"))
    assert not warnings
    assert (run.name, run.data, run.arch, run.steady_workers) == ("run", "cifar10", "resnet18", 2)
    assert (run.global_batch, run.precision, run.seed) == (64, "fp32", 0)
    assert (run.done_epochs, run.planned_epochs, run.is_complete) == (3, 3, True)
    assert (run.train_seconds, run.images_per_second) == (15.0, 1002.0)
    top1 = run.epochs["top1", "val"]
    assert (list(top1.epochs), list(top1.seconds)) == ([1, 2, 3], [5, 10, 15])
    assert list(top1.values) == pytest.approx([0.7, 0.8, 0.9])
    assert list(run.steps["lr"].epochs) == [0.5, 1, 1.5, 2, 2.5, 3]
    assert run.environment == ENVIRONMENT


def test_a_run_that_still_goes_on_has_what_there_is(tmp_path: Path) -> None:
    run, _ = _read(make_run(tmp_path, [start_record(), step_record(5), step_record(10)], '{"kind": "ep'))
    assert (run.done_epochs, run.is_complete) == (None, False)
    assert run.curve("loss", "train") == run.steps["loss"]
    assert run.curve("top1", "val") is None
    assert (run.images_per_second, run.train_seconds) == (1000.0, 5.0)


def test_sessions_of_a_resumed_run_are_one_run(tmp_path: Path) -> None:
    records = [*run_records(1), start_record(workers=4, step=10), epoch_record(2, "val"), {"kind": "stop", "step": 20}]
    run, _ = _read(make_run(tmp_path, records))
    assert (list(run.workers), run.steady_workers, run.stopped) == ([2, 4], None, True)
    assert list(run.epochs["top1", "val"].epochs) == [1, 2]


def test_a_resumed_runs_throughput_is_of_its_last_session(tmp_path: Path) -> None:
    resumed = start_record(workers=4, step=20)
    later = [step_record(25, images_per_second=1900.0), epoch_record(3, "train", images_per_second=2000.0)]
    assert _read(make_run(tmp_path / "whole", [*run_records(2), resumed, *later]))[0].images_per_second == 2000
    assert _read(make_run(tmp_path / "begun", [*run_records(2), resumed, later[0]]))[0].images_per_second == 1900
    assert _read(make_run(tmp_path / "none", [*run_records(2), resumed]))[0].images_per_second is None
    same = [*run_records(2), start_record(step=20), *later]
    assert _read(make_run(tmp_path / "same", same))[0].images_per_second == 1002


def test_a_run_that_reached_its_goal_is_complete(tmp_path: Path) -> None:
    run, _ = _read(make_run(tmp_path, [*run_records(1), {"kind": "desired", "step": 10, "epoch": 1}]))
    assert run.is_complete


def test_records_without_a_step_are_counted(tmp_path: Path) -> None:
    damaged = [
        step_record(5, loss=None),
        step_record(6, loss="x"),
        step_record(7, time_seconds=None),
        {"kind": "epoch"},
    ]
    run, warnings = _read(make_run(tmp_path, [start_record(workers="two"), *damaged, step_record(8, loss=1.0)]))
    assert [value for value in run.steps["loss"].values if math.isfinite(value)] == [1.0]
    assert len(run.steps["loss"]) == 3
    assert run.workers == []
    assert any("skipped 2 records without step or time_seconds" in warning for warning in warnings)


def test_figures_that_no_record_has_are_no_curves(tmp_path: Path) -> None:
    run, _ = _read(make_run(tmp_path))
    assert "loss_scale" not in run.steps
    assert ("data_wait", "val") not in run.epochs


def test_count_of_skipped_steps_is_not_averaged(tmp_path: Path) -> None:
    records = [step_record(step, skipped_steps=step // 7_000) for step in range(1, 10_001)]
    run, _ = _read(make_run(tmp_path, [start_record(), *records]))
    assert (len(run.steps["loss"]), run.steps["skipped_steps"].values[-1]) == (2_000, 1)
