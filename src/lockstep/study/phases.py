"""The clock that measures the phases of steps: by the processor's clock, or on a GPU by events in its stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.train.monitoring.device_clock import DeviceClock
from lockstep.train.monitoring.step_clock import Phase, StepClock
from lockstep.world import accelerator


class PhaseClock(StepClock):
    """Keeps when each phase began. Events are read only in `take`, so that a GPU is never waited for in a step."""

    def __init__(self, device: torch.device):
        self._device = device
        self._clock = DeviceClock(device)
        self._marks: list[tuple[Phase | None, Any]] = []

    def begin(self, phase: Phase) -> None:
        self._marks.append((phase, self._clock.now()))

    def end(self) -> None:
        self._marks.append((None, self._clock.now()))

    def take(self) -> list[Mapping[Phase, float]]:
        """The seconds of each phase, for every step that has ended since the last call."""
        accelerator.synchronize(self._device)
        steps: list[Mapping[Phase, float]] = []
        step: dict[Phase, float] = {}
        for (phase, start), (following, end) in zip(self._marks, self._marks[1:], strict=False):
            if phase is not None:
                step[phase] = step.get(phase, 0.0) + self._clock.seconds(start, end)
            if following is None:
                steps.append(step)
                step = {}
        self._marks.clear()
        return steps
