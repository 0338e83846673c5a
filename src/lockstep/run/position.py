"""How far a run is, as checkpoints store it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.config.mapping import from_mapping
from lockstep.errors import ConfigError

Pairs = tuple[tuple[float, ...], ...]  # numbers, each with its weight
LARGEST_STEP = 1 << 53  # the largest count that float64 holds exactly


@dataclass
class Position:
    """How far a run is: one of the trainer, or of a user's own loop. `seconds` is training time over all sessions."""

    step: int = 0
    seconds: float = 0.0
    best_step: int = 0

    @property
    def place(self) -> tuple[int, ...]:
        """What tells two states of the run apart."""
        return (self.step,)

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
        floats = ("seconds", "joules")
        numbers = [each for name, each in vars(position).items() if type(each) is int or name.endswith(floats)]
        if not all(0 <= number < LARGEST_STEP for number in numbers):
            raise ValueError("progress: a count or a time is out of range")
        return position


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
    def place(self) -> tuple[int, ...]:
        return self.step, self.epoch

    @property
    def is_before_evaluation(self) -> bool:
        return self.step_in_epoch > 0 and not self.has_recorded

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        position = super().from_mapping(values)
        if not all(0 < weight < math.inf for pairs in position.figures.values() for _, weight in pairs):
            raise ValueError("invalid figures")
        return position
