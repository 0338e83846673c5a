"""Ending a run when evaluations no longer get better."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from separable import linear_net, separable

from lockstep.errors import ConfigError
from lockstep.train import Callback, EarlyStopping, Result, TrainingState, fit
from lockstep.train.monitoring.history import History


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


def _fit(path: Path, *callbacks: Callback) -> Result:
    settings: dict[str, Any] = {"epochs": 20, "batch_size": 32, "loader_workers": 0, "track": (), "lr": 1e-9}
    train, val = separable(64, 1), separable(32, 2)
    return fit(linear_net(), train, val, callbacks=callbacks, run_dir=path, resume="auto", **settings)


def test_run_ends_early_and_stays_ended_when_resumed(tmp_path: Path) -> None:
    stopping = EarlyStopping(patience=3, monitor="top1")  # which such a rate never changes
    result = _fit(tmp_path, stopping)
    assert result.steps == 8
    assert len(result.history.val["loss"]) == 4
    count = Count()
    again = _fit(tmp_path, stopping, count)
    assert (again.steps, count.steps, again.top1) == (8, 0, result.top1)
    assert len(again.history.val["loss"]) == 4
    assert _fit(tmp_path, EarlyStopping(patience=5, monitor="top1")).steps == 12


def test_a_figure_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"monitor='val_loss'\): unknown metric; choose from loss, top1, top5"):
        _fit(tmp_path, EarlyStopping(monitor="val_loss"))


@pytest.mark.parametrize(
    ("options", "message"), [({"patience": 0}, "patience=0"), ({"mode": "up"}, "mode='up'"), ({"min_delta": -1}, "-1")]
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**options)
