"""Time the phases of steps, and publish the current one for diagnosing hangs.

Times are those of the CPU clock or, on a device with streams, of events in its stream, which are read later, so that
steps never wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from lockstep.diagnosis import publisher
from lockstep.diagnosis.board import FINISHED, TRAINER
from lockstep.world import accelerator
from lockstep.world.device_clock import DeviceClock

# Waiting for a batch; the user's callbacks; both passes; the step's metrics; waiting for the other workers, mostly for
# their gradients; updating the weights.
Phase = Literal["data_wait", "callbacks", "forward", "backward", "metrics", "reduction", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Phases = Mapping[Phase, float]  # seconds
MOST_MARKS = 512  # not yet read; at more, about half of them are read


class StepClock:
    """Called by the loop when a phase of a step starts, which ends the previous one, and when the step ends."""

    def __init__(self, device: torch.device):
        self._device = device
        self._clock = DeviceClock(device)
        self._marks: list[tuple[Phase | None, Any]] = []  # the starts of phases; None: the end of a step
        self._steps: list[Phases] = []
        self._step: dict[Phase, float] = {}  # the phases that are read of the next of `_steps`
        self._board = publisher.own_board()
        if self._board:
            self._board.set_flag(TRAINER)
            self._board.set_flag(FINISHED, False)

    def begin(self, phase: Phase) -> None:
        """Start a phase of the step, unless it is the current one."""
        if self._marks and self._marks[-1][0] == phase:
            return
        self._marks.append((phase, self._clock.now()))
        if self._board:
            self._board.report(phase)

    def end(self) -> None:
        """End the step; the time until the next one is not counted."""
        self._marks.append((None, self._clock.now()))
        if self._board:
            self._board.report("running")
        if len(self._marks) > MOST_MARKS:
            rest = enumerate(self._marks[MOST_MARKS // 2 : -1], start=MOST_MARKS // 2)
            earlier = next((number for number, (phase, _) in rest if phase is None), 0)  # the end of an earlier step
            self._clock.wait_for(self._marks[earlier][1])
            self._read(earlier)

    def take(self) -> list[Phases]:
        """Return the seconds of each phase for every step that ended since the last call; waits for the device."""
        accelerator.synchronize(self._device)
        self._read(len(self._marks))
        steps, self._steps = self._steps, []
        return steps

    def forget(self) -> None:
        """Discard all times so far."""
        self._marks, self._steps, self._step = [], [], {}

    def _read(self, count: int) -> None:
        """Read the first `count` marks."""
        for (phase, start), (following, end) in zip(self._marks[:count], self._marks[1:], strict=False):
            if phase is not None:
                self._step[phase] = self._step.get(phase, 0.0) + self._clock.seconds(start, end)
            if following is None:
                self._steps.append(self._step)
                self._step = {}
        del self._marks[:count]
