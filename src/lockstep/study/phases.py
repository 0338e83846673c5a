"""Time the phases of steps: with the CPU clock, or on a GPU with events in the stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.world.device_clock import DeviceClock
from lockstep.train.monitoring.step_clock import Phase, StepClock
from lockstep.world import accelerator


class PhaseClock(StepClock):
    """Records the start of each phase. Events are read only in `take`, so that steps never wait for a GPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._clock = DeviceClock(device)
        self._marks: list[tuple[Phase | None, Any]] = []

    def begin(self, phase: Phase) -> None:
        self._marks.append((phase, self._clock.now()))

    def end(self) -> None:
        self._marks.append((None, self._clock.now()))

    def take(self) -> list[Mapping[Phase, float]]:
        """Return the seconds of each phase for every step that ended since the last `take`."""
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
