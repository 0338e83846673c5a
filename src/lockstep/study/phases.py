"""The clock that measures the phases of steps: by the processor's clock, or on a GPU by events in its stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from lockstep import accelerator
from lockstep.train.step_clock import Phase, StepClock


class PhaseClock(StepClock):
    """Keeps when each phase began. Events are read only in `take`, so that a GPU is never waited for in a step."""

    def __init__(self, device: torch.device):
        self._device = device
        self._on_gpu = accelerator.overlaps(device)
        self._marks: list[tuple[Phase | None, Any]] = []

    def begin(self, phase: Phase) -> None:
        self._marks.append((phase, self._now()))

    def end(self) -> None:
        self._marks.append((None, self._now()))

    def take(self) -> list[Mapping[Phase, float]]:
        """The seconds of each phase, for every step that has ended since the last call."""
        if self._on_gpu:
            accelerator.synchronize(self._device)
        steps: list[Mapping[Phase, float]] = []
        step: dict[Phase, float] = {}
        for (phase, start), (following, end) in zip(self._marks, self._marks[1:], strict=False):
            if phase is not None:
                step[phase] = step.get(phase, 0.0) + self._seconds(start, end)
            if following is None:
                steps.append(step)
                step = {}
        self._marks.clear()
        return steps

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = accelerator.new_event(self._device, timing=True)
        accelerator.current_stream(self._device).record_event(event)
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000 if self._on_gpu else float(end - start)
