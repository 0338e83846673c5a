"""Callbacks, and runs that stop early."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import final_weights
from separable import fit_separable
from worker_group import run_in_workers

from lockstep.errors import ConfigError
from lockstep.files.jsonl import read_records
from lockstep.run.checkpoints.checkpoint_format import verify
from lockstep.train import Callback, EarlyStopping, Result, TrainingState
from lockstep.train.history import History
from lockstep.world.world import World


def _fit(path: Path, *callbacks: Any, **settings: Any) -> Result:
    return fit_separable(path, callbacks=callbacks, **settings)


class Diary(Callback):
    """Notes what it is called for; draws random numbers, which must not change the training."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def on_epoch_begin(self, run: TrainingState) -> None:
        self.entries.append(("epoch begin", run.step, run.epoch))

    def on_step_begin(self, run: TrainingState) -> None:
        torch.rand(1)
        self.entries.append(("step begin", run.step))
        assert run.epoch == run.step // 4 + 1 or run.workers > 1

    def on_step_end(self, run: TrainingState) -> None:
        self.entries.append(("step end", run.step, run.epoch))

    def on_epoch_end(self, run: TrainingState, figures: Mapping[str, Any]) -> None:
        assert figures["loss"] == run.history.val["loss"][-1]
        self.entries.append(("epoch end", run.step, sorted(figures)))

    def on_checkpoint(self, run: TrainingState, path: Path) -> None:
        verify(path)
        self.entries.append(("checkpoint", path.name))


class StopAt(Callback):
    """Asks for a stop after a step, on one worker alone."""

    def __init__(self, step: int, rank: int = 0):
        self._step, self._rank = step, rank

    def on_step_end(self, run: TrainingState) -> None:
        if run.step == self._step and run.rank == self._rank:
            run.stop("enough")


def test_they_are_called_in_order_and_change_nothing(tmp_path: Path) -> None:
    diary = Diary()
    figures = ["loss", "samples", "top1", "top5"]
    _fit(tmp_path / "told", diary, epochs=2, checkpoint_steps=3)
    assert diary.entries == [
        *(("epoch begin", 0, 1), ("step begin", 0), ("step end", 1, 1), ("step begin", 1), ("step end", 2, 1)),
        *(("step begin", 2), ("step end", 3, 1), ("checkpoint", "step-00000003"), ("step begin", 3)),
        *(("step end", 4, 1), ("epoch end", 4, figures), ("checkpoint", "step-00000004")),
        *(("epoch begin", 4, 2), ("step begin", 4), ("step end", 5, 2), ("step begin", 5), ("step end", 6, 2)),
        *(("checkpoint", "step-00000006"), ("step begin", 6), ("step end", 7, 2), ("step begin", 7)),
        *(("step end", 8, 2), ("epoch end", 8, figures), ("checkpoint", "step-00000008")),
    ]
    _fit(tmp_path / "plain", epochs=2, checkpoint_steps=3)
    assert final_weights(tmp_path / "told") == final_weights(tmp_path / "plain")


@pytest.mark.parametrize("step", [1, 4, 6])
def test_stop_takes_effect_after_that_step_with_a_checkpoint(
    tmp_path: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _fit(tmp_path, StopAt(step))
    assert result.steps == step
    assert result.samples == 32
    assert max((tmp_path / "checkpoints").glob("step-*")).name == f"step-{step:08d}"
    assert f"stopping after step {step}: enough" in capsys.readouterr().out


class StopAtCheckpoint(Diary):
    def on_checkpoint(self, run: TrainingState, path: Path) -> None:
        super().on_checkpoint(run, path)
        if run.step == 2:
            run.stop()


def test_stop_at_a_checkpoint_within_an_epoch_ends_the_run_there(tmp_path: Path) -> None:
    diary = StopAtCheckpoint()
    result = _fit(tmp_path, diary, checkpoint_steps=2)
    assert (result.steps, result.samples) == (2, 32)
    assert diary.entries.count(("checkpoint", "step-00000002")) == 1  # though it is written again, once evaluated
    assert max((tmp_path / "checkpoints").glob("step-*")).name == "step-00000002"


class StopAtEpochBegin(Diary):
    def on_epoch_begin(self, run: TrainingState) -> None:
        if run.epoch == 2:
            run.stop()


@pytest.mark.parametrize("checkpoint_epochs", [1, 3])
def test_a_stop_before_an_epoch_evaluates_nothing_twice(tmp_path: Path, checkpoint_epochs: int) -> None:
    diary = StopAtEpochBegin()
    result = _fit(tmp_path, diary, checkpoint_epochs=checkpoint_epochs)
    assert (result.steps, result.samples, result.best_top1) == (4, 32, result.top1)
    assert [entry for entry in diary.entries if not entry[0].startswith("step")] == [
        ("epoch end", 4, ["loss", "samples", "top1", "top5"]),
        ("checkpoint", "step-00000004"),
    ]
    records = [r for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "epoch"]
    assert [r["split"] for r in records] == ["train", "val"]


def _fit_in_workers(world: World, path: Path) -> tuple[int, bool]:
    diary = Diary()
    steps = _fit(path, diary, StopAt(5, rank=1), batch_size=8).steps
    return steps, ("checkpoint", "step-00000005") in diary.entries


def test_stop_of_one_worker_ends_all_after_the_same_step(tmp_path: Path) -> None:
    assert run_in_workers(3, _fit_in_workers, tmp_path) == [(5, True)] * 3


def _fit_with_one_callback(world: World, path: Path) -> int:
    """Rank 0 alone has callbacks, as scripts may have it."""
    callbacks = [Diary(), StopAt(5)] if world.rank == 0 else []
    return _fit(path, *callbacks, batch_size=8).steps


def test_one_worker_alone_may_have_callbacks(tmp_path: Path) -> None:
    assert run_in_workers(2, _fit_with_one_callback, tmp_path) == [5, 5]


@pytest.mark.parametrize(
    ("callback", "message"),
    [(EarlyStopping, "is a class, not an instance"), (print, "has no on_epoch_begin; pass instances of")],
)
def test_what_cannot_be_a_callback_is_named(tmp_path: Path, callback: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"callbacks=: .*{message}"):
        _fit(tmp_path, callback)


class Run:
    """What early stopping sees of a run, with validation figures of ours."""

    def __init__(self, name: str):
        self.reason, self._name = "", name
        self.values: list[float] = []

    @property
    def history(self) -> History:
        return History({}, {self._name: np.array(self.values)})

    def stop(self, reason: str) -> None:
        self.reason = reason


@pytest.mark.parametrize(
    ("options", "values", "epochs"),
    [
        ({"patience": 2}, [3, 2, 2.5, 2.4, 1], 4),
        ({"patience": 2}, [3, 2, 2.5, 1, 1, 1], 6),
        ({"patience": 2, "monitor": "top1"}, [0.5, 0.6, 0.6, 0.55, 0.9], 4),
        ({"patience": 1, "min_delta": 0.5}, [3, 2, 1.6, 0], 3),
        ({"patience": 1, "monitor": "f1", "mode": "min"}, [3, 2, 4], 3),
        ({"patience": 1}, [float("nan"), 2, 1, 1.5], 1),
        ({"patience": 9}, [1, 2, 3], None),
    ],
)
def test_it_stops_when_that_many_evaluations_were_no_better(
    options: dict[str, Any], values: list[float], epochs: int | None
) -> None:
    run, stopping = Run(options.get("monitor", "loss")), EarlyStopping(**options)
    stopped = None
    for epoch, value in enumerate(values, start=1):
        run.values.append(value)
        stopping.on_epoch_end(run, {options.get("monitor", "loss"): value})  # type: ignore[arg-type]
        if run.reason:
            stopped = epoch
            break
    assert stopped == epochs


class Count(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, run: TrainingState) -> None:
        self.steps += 1

    def on_epoch_end(self, run: TrainingState, figures: Mapping[str, Any]) -> None: ...


def _fit_until_it_stops(path: Path, *callbacks: Callback) -> Result:
    return _fit(path, *callbacks, epochs=20, batch_size=32, lr=1e-9, resume="auto")


def test_run_ends_early_and_stays_ended_when_resumed(tmp_path: Path) -> None:
    stopping = EarlyStopping(patience=3, monitor="top1")  # which such a rate never changes
    result = _fit_until_it_stops(tmp_path, stopping)
    assert result.steps == 8
    assert len(result.history.val["loss"]) == 4
    count = Count()
    again = _fit_until_it_stops(tmp_path, stopping, count)
    assert (again.steps, count.steps, again.top1) == (8, 0, result.top1)
    assert len(again.history.val["loss"]) == 4
    assert _fit_until_it_stops(tmp_path, EarlyStopping(patience=5, monitor="top1")).steps == 12


def test_a_figure_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"monitor='val_loss'\): unknown metric; choose from loss, top1, top5"):
        _fit_until_it_stops(tmp_path, EarlyStopping(monitor="val_loss"))


@pytest.mark.parametrize(
    ("options", "message"), [({"patience": 0}, "patience=0"), ({"mode": "up"}, "mode='up'"), ({"min_delta": -1}, "-1")]
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**options)
