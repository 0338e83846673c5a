"""Publish the current phase of a step, for diagnosing hangs; `lockstep.study.phases` times the phases."""

from __future__ import annotations

from typing import Literal

from lockstep.diagnosis import publisher
from lockstep.diagnosis.board import FINISHED, TRAINER, Board

# Waiting for a batch; both passes; the step's metrics; waiting for gradient reduction; updating the weights.
Phase = Literal["data_wait", "forward", "backward", "metrics", "reduction", "optimizer"]


class StepClock:
    """Called by the loop when a phase of a step starts, which ends the previous one."""

    def begin(self, phase: Phase) -> None:
        """Start a phase of the step."""

    def end(self) -> None:
        """End the step."""


class PublishingClock(StepClock):
    """Publishes each phase on this worker's board."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def begin(self, phase: Phase) -> None:
        self._board.report(phase)


def new_clock() -> StepClock:
    """Return the clock for normal training."""
    board = publisher.own_board()
    if not board:
        return StepClock()
    board.set_flag(TRAINER)
    board.set_flag(FINISHED, False)
    return PublishingClock(board)
