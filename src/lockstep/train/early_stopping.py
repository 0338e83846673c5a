"""Stop a run when its evaluations no longer improve, or when they reach the target accuracy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import numpy as np

from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.callbacks import Callback, TrainingState
from lockstep.train.job import Job
from lockstep.train.progress import Progress

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


def is_reached(config: TrainConfig, progress: Progress) -> bool:
    """Return whether any evaluation of the run, even before a resume, reached --desired-acc; equal on all workers."""
    desired = config.run.desired_acc
    return desired is not None and progress.best_top1 >= desired


def report_reached(job: Job) -> None:
    """Record that the last evaluation reached --desired-acc."""
    progress = job.progress
    job.tracker.record(
        {
            "kind": "desired",
            "step": progress.step,
            "epoch": _epoch(progress.step, job.steps_per_epoch),
            "desired_acc": job.config.run.desired_acc,
            "top1": progress.best_top1,
            "time_seconds": progress.seconds,
            "unix_time": time.time(),
        }
    )


def describe(config: TrainConfig, progress: Progress, steps_per_epoch: int) -> list[str]:
    """Return one line on whether and when --desired-acc was reached; no line without the flag."""
    desired = config.run.desired_acc
    if desired is None:
        return []
    best, step = f"{100 * progress.best_top1:.2f} %", progress.best_step
    where = f"top-1 {best} after epoch {_epoch(step, steps_per_epoch)}, step {step:,}"
    if not is_reached(config, progress):
        return [f"desired accuracy {100 * desired:.2f} % not reached: the best is {where}"]
    took = f", {_duration(progress.seconds)}" if step == progress.step else ""  # unknown for earlier steps
    return [f"desired accuracy {100 * desired:.2f} % reached: {where}{took}"]


def _epoch(step: int, steps_per_epoch: int) -> int:
    return -(-step // steps_per_epoch)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    rough = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
    return f"{rough if minutes else f'{seconds:.1f} s'} of training ({timedelta(seconds=round(seconds))})"
