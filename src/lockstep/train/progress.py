"""The progress of a run: the state that a checkpoint stores besides tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.run.position import LARGEST_STEP, Position
from lockstep.train.metrics import Totals
from lockstep.train.worker_times import Times


@dataclass
class Progress(Position):
    """Counts and sums of a training, up to the last finished step.

    `step` counts global batches, including `skipped_steps` without an update because of a NaN or infinite gradient.
    The `epoch_` fields cover the current epoch, the `open_` fields and `overflowed` the steps without a record.
    """

    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    overflowed: tuple[int, ...] = ()
    open_totals: Totals = field(default_factory=Totals)
    open_times: tuple[float, float] = 0.0, 0.0
    epoch_totals: Totals = field(default_factory=Totals)
    epoch_seconds: float = 0.0
    epoch_wait_seconds: float = 0.0
    epoch_joules: float = 0.0
    best_top1: float = -1.0
    best_loss: float | None = None  # of evaluations without classes

    @property
    def is_before_evaluation(self) -> bool:
        return self.epoch_totals.count > 0

    @property
    def steps_taken(self) -> int:
        """Steps taken by the optimizer; the learning rate schedule is based on these."""
        return self.step - self.skipped_steps

    def add_interval(self, steps: Sequence[Totals], times: Times) -> None:
        """Add the sums and times of the steps since the last call.

        The sums are added step by step, so they are bitwise independent of the interval boundaries.
        """
        self.epoch_totals = sum(steps, self.epoch_totals)
        self.open_totals = sum(steps, self.open_totals)
        self.open_times = self.open_times[0] + times.seconds, self.open_times[1] + times.wait_seconds
        self.seconds += times.seconds
        self.epoch_seconds += times.seconds
        self.epoch_wait_seconds += times.wait_seconds

    def leave_out(self, step: int) -> None:
        """Count a step as skipped."""
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        self.overflowed += (step,)

    def take_evaluation(self, figures: Mapping[str, Any]) -> bool:
        """Return whether the state is the best so far: the highest top-1 or, without classes, the lowest loss."""
        loss = math.inf if self.best_loss is None else self.best_loss
        is_best = bool(figures["top1"] > self.best_top1 if "top1" in figures else figures["loss"] < loss)
        if is_best:
            self.best_step, self.best_top1 = self.step, figures.get("top1", self.best_top1)
            self.best_loss = None if "top1" in figures else figures["loss"]
        return is_best

    def end_epoch(self) -> None:
        """Start the next epoch's sums."""
        self.epoch_totals = Totals()
        self.epoch_seconds = self.epoch_wait_seconds = self.epoch_joules = 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        progress = super().from_mapping(values)
        numbers = *progress.overflowed, *progress.open_times
        if not all(0 <= each < LARGEST_STEP for each in numbers) or progress.skipped_steps > progress.step:
            raise ValueError("progress: invalid skipped steps or times")
        return progress
