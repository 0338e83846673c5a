"""The progress of a run: the state that a checkpoint stores besides tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.config.mapping import from_mapping
from lockstep.errors import ConfigError
from lockstep.train.metrics import Totals
from lockstep.train.monitoring.worker_times import Times

LARGEST_STEP = 1 << 53  # the largest count that float64 holds exactly


@dataclass
class Position:
    """How far a run is: one of the trainer, or of a user's own loop. `seconds` is training time over all sessions."""

    step: int = 0
    seconds: float = 0.0
    best_step: int = 0

    @property
    def is_before_evaluation(self) -> bool:
        """Whether a resumed run writes the record of an evaluation after this step again."""
        return False

    def take_best(self, values: Mapping[str, Any]) -> None:
        """Take the best evaluation from the mapping of another position; an empty one, or an invalid one: none."""
        try:
            best = self.from_mapping(values)
        except (ConfigError, TypeError, ValueError):
            best = type(self)()
        vars(self).update({name: value for name, value in vars(best).items() if name.startswith("best_")})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from the mapping of a position, read back from an untrusted file.

        Raises:
            TypeError, ValueError: A value is unknown, of the wrong type, or out of range.
        """
        position = from_mapping(cls, values, "progress")
        numbers = [each for name, each in vars(position).items() if type(each) is int or name.endswith("seconds")]
        if not all(0 <= number < LARGEST_STEP for number in numbers):
            raise ValueError("progress: a count or a time is out of range")
        return position


@dataclass
class Progress(Position):
    """Counts and sums of a training, up to the last finished step.

    `step` counts global batches, including `skipped_steps` without an update because of a NaN or infinite gradient.
    The `epoch_` fields cover the current epoch, and `overflowed` lists the skipped steps that are not in a record yet.
    """

    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    overflowed: tuple[int, ...] = ()
    epoch_totals: Totals = field(default_factory=Totals)
    epoch_seconds: float = 0.0
    epoch_wait_seconds: float = 0.0
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
        self.epoch_seconds = self.epoch_wait_seconds = 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        progress = super().from_mapping(values)
        if not all(0 <= step < LARGEST_STEP for step in progress.overflowed) or progress.skipped_steps > progress.step:
            raise ValueError("progress: invalid skipped steps")
        return progress
