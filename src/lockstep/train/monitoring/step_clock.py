"""The clock of a step's phases. This one measures nothing, for normal training; see `lockstep.study.phases`."""

from __future__ import annotations

from typing import Literal

# Waiting for a batch; both passes; the step's metrics; waiting for gradient reduction; updating the weights.
Phase = Literal["data_wait", "forward", "backward", "metrics", "reduction", "optimizer"]


class StepClock:
    """Called by the loop when a phase of a step starts, which ends the previous one."""

    def begin(self, phase: Phase) -> None:
        """Start a phase of the step."""

    def end(self) -> None:
        """End the step."""
