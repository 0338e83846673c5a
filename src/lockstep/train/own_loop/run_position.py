"""The position of a run of a user's own loop, as checkpoints store it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.train.own_loop.step_figures import Pairs
from lockstep.train.progress import LARGEST_STEP


@dataclass
class Position:
    """Where a run is: steps and epochs done, and steps done of the current epoch. `seconds` is of training alone.

    `has_recorded`: whether `TrainingRun.record` was called since the last step; a resumed run does not repeat it.
    `figures`: those of the steps since the last report, when a checkpoint was written.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    seconds: float = 0.0
    has_recorded: bool = False
    figures: dict[str, Pairs] = field(default_factory=dict)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Position:
        """Build from a checkpoint's values.

        Raises:
            TypeError, ValueError: A value is missing, of another type, or out of range.
        """
        position = cls(**values)
        for count in (position.step, position.epoch, position.step_in_epoch):
            if type(count) is not int or not 0 <= count < LARGEST_STEP:
                raise ValueError(f"invalid step or epoch: {str(count)[:40]}")
        if type(position.seconds) not in (int, float) or not 0 <= position.seconds < math.inf:
            raise ValueError("invalid seconds")
        for pairs in position.figures.values():
            if any(type(number) is not float or not 0 < weight < math.inf for number, weight in pairs):
                raise ValueError("invalid figures")
        return position
