"""The clock of a step's phases; this one measures nothing, as in a training run. `lockstep.study.phases` measures."""

from __future__ import annotations

from typing import Literal

# Waiting for a batch; the passes; figures of the step; waiting for gradients that still travel; changing the weights.
Phase = Literal["data_wait", "forward", "backward", "metrics", "reduction", "optimizer"]


class StepClock:
    """Told by the loop when a phase of a step begins, which is when the one before ends."""

    def begin(self, phase: Phase) -> None:
        """From now on, until the next call, the step is in this phase."""

    def end(self) -> None:
        """The step is over."""
