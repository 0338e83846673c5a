"""Stop a run when its evaluations no longer improve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from lockstep.errors import ConfigError
from lockstep.train.custom.callbacks import Callback, TrainingState

FALLING = ("loss",)
"""Results that improve by decreasing; for custom metrics, set `mode`."""


class EarlyStopping(Callback):
    """Stops the run after `patience` consecutive evaluations without improvement.

    Evaluations before a resume count. The best weights are in the run folder's model.safetensors if `monitor` is top1.

    Args:
        monitor: loss, top1, top5 or the name of a metric, from the evaluations.
        mode: Whether smaller (min) or larger (max) is better; auto: min for loss, max for others.
        min_delta: An improvement must exceed this.
    """

    def __init__(
        self,
        patience: int = 5,
        monitor: str = "loss",
        mode: Literal["auto", "min", "max"] = "auto",
        min_delta: float = 0.0,
    ):
        if patience < 1:
            raise ConfigError(f"EarlyStopping(patience={patience}): must be at least 1")
        if mode not in ("auto", "min", "max"):
            raise ConfigError(f"EarlyStopping(mode={mode!r}): must be 'auto', 'min' or 'max'")
        if not min_delta >= 0:
            raise ConfigError(f"EarlyStopping(min_delta={min_delta}): must be at least 0")
        self._patience, self._monitor, self._min_delta = patience, monitor, min_delta
        self._sign = -1.0 if mode == "min" or (mode == "auto" and monitor in FALLING) else 1.0

    def on_epoch_begin(self, run: TrainingState) -> None:
        self._check(run)  # a resumed run may have met the condition already

    def on_epoch_end(self, run: TrainingState, figures: Mapping[str, Any]) -> None:
        if self._monitor not in figures:
            known = ", ".join(name for name in figures if name != "samples")
            raise ConfigError(f"EarlyStopping(monitor={self._monitor!r}): unknown metric; choose from {known}")
        if np.ndim(figures[self._monitor]):
            raise ConfigError(f"EarlyStopping(monitor={self._monitor!r}): this metric is not a single number")
        self._check(run)

    def _check(self, run: TrainingState) -> None:
        values = run.history.val.get(self._monitor, np.zeros(0))
        best, since = -np.inf, 0
        for value in self._sign * values:
            best, since = (value, 0) if value > best + self._min_delta else (best, since + 1)
        if since >= self._patience:
            run.stop(f"{self._monitor} has not improved in {since} evaluations; the best is {self._sign * best:.4g}")
