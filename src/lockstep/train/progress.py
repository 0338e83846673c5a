"""How far a run has come: what a checkpoint must remember beside tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.train.metrics import Totals
from lockstep.train.monitoring.report_interval import Times

LARGEST_STEP = 1 << 53  # floats count exactly up to here, and no run takes so many


@dataclass
class Progress:
    """Counts and sums up to the last finished step.

    `step` counts the global batches that were used; of these, `skipped_steps` changed nothing, because a gradient was
    infinite or not a number. `seconds` is training time over all sessions of the run; the `epoch_` fields cover the
    epoch that runs, and `overflowed` numbers the skipped steps that no record has covered yet.
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
        """Steps that the optimizer took, which is what the schedule of the learning rate goes by."""
        return self.step - self.skipped_steps

    def add_interval(self, steps: Sequence[Totals], times: Times) -> None:
        """Add the sums and times of the steps since the last call.

        The epoch's sums grow step by step, so that they are the same to the bit wherever the intervals were cut.
        """
        self.epoch_totals = sum(steps, self.epoch_totals)
        self.seconds += times.seconds
        self.epoch_seconds += times.seconds
        self.epoch_wait_seconds += times.wait_seconds
        self.epoch_excluded_seconds += times.excluded_seconds

    def leave_out(self, step: int) -> None:
        """Count a step, the newest or the one that is being taken, as one that changes nothing."""
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        self.overflowed.append(step)

    def forget_best(self) -> None:
        """The checkpoint of the best evaluation is not there: the next one is the best."""
        self.best_top1, self.best_step = -1.0, 0

    def become(self, other: Progress) -> None:
        """Go back to where another stands, in place."""
        self.__dict__.update(other.__dict__)

    def end_epoch(self) -> None:
        """Start the next epoch's sums."""
        self.epoch_totals = Totals()
        self.epoch_seconds = self.epoch_wait_seconds = self.epoch_excluded_seconds = 0.0

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Progress:
        """What `to_mapping` gave, read back from a file that may be anyone's.

        Raises:
            TypeError, ValueError, KeyError: A value is missing, of another type, or none that a run can have.
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
