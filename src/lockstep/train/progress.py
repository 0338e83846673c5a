"""The progress of a run: the state that a checkpoint stores besides tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.train.metrics import Totals
from lockstep.train.monitoring.worker_times import Times

LARGEST_STEP = 1 << 53  # the largest count that float64 holds exactly


@dataclass
class Progress:
    """Counts and sums up to the last finished step.

    `step` counts global batches, including `skipped_steps` without an update because of a NaN or infinite gradient.
    `seconds` is training time over all sessions of the run. The `epoch_` fields cover the current epoch, and
    `overflowed` lists the skipped steps that are not in a record yet.
    """

    step: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    overflowed: list[int] = field(default_factory=list)
    seconds: float = 0.0
    epoch_totals: Totals = field(default_factory=Totals)
    epoch_seconds: float = 0.0
    epoch_wait_seconds: float = 0.0
    epoch_excluded_seconds: float = 0.0
    best_top1: float = -1.0
    best_step: int = 0

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
        self.epoch_excluded_seconds += times.excluded_seconds

    def leave_out(self, step: int) -> None:
        """Count a step as skipped."""
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        self.overflowed.append(step)

    def forget_best(self) -> None:
        """Reset the best evaluation, because its checkpoint is missing."""
        self.best_top1, self.best_step = -1.0, 0

    def become(self, other: Progress) -> None:
        """Copy the state of another progress, in place."""
        self.__dict__.update(other.__dict__)

    def end_epoch(self) -> None:
        """Start the next epoch's sums."""
        self.epoch_totals = Totals()
        self.epoch_seconds = self.epoch_wait_seconds = self.epoch_excluded_seconds = 0.0

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Progress:
        """Build from the result of `to_mapping`, read back from an untrusted file.

        Raises:
            TypeError, ValueError, KeyError: A value is missing, of the wrong type, or out of range.
        """
        totals = Totals(**values["epoch_totals"])
        progress = cls(**{**values, "epoch_totals": totals})
        counts = [progress.step, progress.skipped_steps, progress.skipped_in_a_row, progress.best_step]
        if not isinstance(progress.overflowed, list):
            raise TypeError("overflowed is not a list")
        for count in (*counts, *progress.overflowed):
            if type(count) is not int or not 0 <= count < LARGEST_STEP:
                raise ValueError(f"invalid step count: {str(count)[:40]}")
        in_epoch = [progress.epoch_seconds, progress.epoch_wait_seconds, progress.epoch_excluded_seconds]
        times = [progress.seconds, *in_epoch]
        for figure in (*times, progress.best_top1, *asdict(totals).values()):
            if type(figure) not in (int, float):
                raise TypeError(f"{str(figure)[:40]} is not a number")
        if not all(0 <= each < LARGEST_STEP for each in times) or progress.skipped_steps > progress.step:
            raise ValueError("invalid times or skipped steps")
        return progress
