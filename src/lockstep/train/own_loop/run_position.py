"""The position of a run of a user's own loop, as checkpoints store it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.train.own_loop.step_figures import Pairs
from lockstep.train.progress import Position


@dataclass
class LoopPosition(Position):
    """Where a loop is: epochs done, and steps done of the current epoch.

    `has_recorded`: whether `TrainingRun.record` was called since the last step; a resumed run does not repeat it.
    `figures`: those of the steps since the last report, when a checkpoint was written.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    has_recorded: bool = False
    figures: dict[str, Pairs] = field(default_factory=dict)

    @property
    def is_before_evaluation(self) -> bool:
        return self.step_in_epoch > 0 and not self.has_recorded

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        position = super().from_mapping(values)
        if not all(0 < weight < math.inf for pairs in position.figures.values() for _, weight in pairs):
            raise ValueError("invalid figures")
        return position
