"""Training until an accuracy is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from separable import linear_net, separable

from lockstep.files.jsonl import read_records
from lockstep.train import Result, fit

SETTINGS: dict[str, Any] = {"batch_size": 16, "lr": 0.00625, "loader_workers": 0, "track": ()}


def _train(**settings: Any) -> Result:
    return fit(linear_net(), separable(160, 1, 0.5), separable(64, 2, 0.5), **{**SETTINGS, **settings})


def _records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(run / "metrics.jsonl") if record["kind"] == kind]


def test_training_ends_with_the_evaluation_that_reaches_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _train(epochs=50, desired_acc=0.9, checkpoint_epochs=0, run_dir=tmp_path)
    evaluations = [record for record in _records(tmp_path, "epoch") if record["split"] == "val"]
    assert [record["top1"] >= 0.9 for record in evaluations] == [False] * (len(evaluations) - 1) + [True]
    epochs = len(evaluations)
    assert 1 < epochs < 50
    assert (result.steps, result.top1, result.best_top1) == (10 * epochs, evaluations[-1]["top1"], result.top1)
    assert (tmp_path / "checkpoints" / "best").resolve().name == f"step-{result.steps:08d}"
    (reached,) = _records(tmp_path, "desired")
    assert (reached["step"], reached["epoch"], reached["desired_acc"]) == (result.steps, epochs, 0.9)
    assert (reached["top1"], reached["time_seconds"]) == (result.top1, result.seconds)
    last = capsys.readouterr().out.splitlines()[-1]
    words = (
        f"desired accuracy 90.00 % reached: top-1 {100 * result.top1:.2f} % after epoch {epochs}, step {result.steps},"
    )
    assert last.startswith(words)
    assert ", 0:00:0" in last
    assert last.endswith(" of training")


def test_a_run_that_has_reached_it_does_not_go_on_when_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _train(epochs=50, desired_acc=0.9, run_dir=tmp_path)
    again = _train(epochs=50, desired_acc=0.9, run_dir=tmp_path, resume="auto")
    assert (again.steps, again.top1, again.loss) == (first.steps, first.top1, first.loss)
    assert len(_records(tmp_path, "desired")) == 1
    assert "desired accuracy 90.00 % reached: top-1" in capsys.readouterr().out.splitlines()[-1]
    further = _train(epochs=50, desired_acc=0.99, run_dir=tmp_path, resume="auto")
    assert further.steps > first.steps


def test_unreached_target_is_reported_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _train(epochs=2, desired_acc=1.0, run_dir=tmp_path)
    assert result.steps == 20
    assert not _records(tmp_path, "desired")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"desired accuracy 100.00 % not reached: the best is top-1 {100 * result.best_top1:.2f} %")


def test_the_moving_average_is_what_counts_where_there_is_one(tmp_path: Path) -> None:
    plain = _train(epochs=50, desired_acc=0.9, run_dir=tmp_path / "plain")
    slow = _train(epochs=50, desired_acc=0.9, ema_decay=0.98, run_dir=tmp_path / "average")
    assert slow.top1 >= 0.9
    assert slow.steps > plain.steps  # the average lags behind
