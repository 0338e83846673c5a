"""Training until an accuracy is reached."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from separable import fit_separable

from lockstep.files.jsonl import read_records

_train = partial(fit_separable, train=160, val=64, contrast=0.5, lr=0.00625)


def _records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(run / "metrics.jsonl") if record["kind"] == kind]


def test_training_ends_with_the_evaluation_that_reaches_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _train(tmp_path, epochs=50, desired_acc=0.9, checkpoint_epochs=0)
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
    first = _train(tmp_path, epochs=50, desired_acc=0.9)
    again = _train(tmp_path, epochs=50, desired_acc=0.9, resume="auto")
    assert (again.steps, again.top1, again.loss) == (first.steps, first.top1, first.loss)
    assert len(_records(tmp_path, "desired")) == 1
    assert "desired accuracy 90.00 % reached: top-1" in capsys.readouterr().out.splitlines()[-1]
    further = _train(tmp_path, epochs=50, desired_acc=0.99, resume="auto")
    assert further.steps > first.steps


def test_unreached_target_is_reported_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _train(tmp_path, epochs=2, desired_acc=1.0)
    assert result.steps == 20
    assert not _records(tmp_path, "desired")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"desired accuracy 100.00 % not reached: the best is top-1 {100 * result.best_top1:.2f} %")


def test_the_moving_average_is_what_counts_where_there_is_one(tmp_path: Path) -> None:
    plain = _train(tmp_path / "plain", epochs=50, desired_acc=0.9)
    slow = _train(tmp_path / "average", epochs=50, desired_acc=0.9, ema_decay=0.98)
    assert slow.top1 >= 0.9
    assert slow.steps > plain.steps  # the average lags behind
