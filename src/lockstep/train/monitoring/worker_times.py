"""The time of each worker's phases, gathered at each report, to name workers that slow the others down."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from statistics import median
from typing import Any

import torch

from lockstep.diagnosis.phases import PHASES, Phase
from lockstep.diagnosis.stragglers import Oversubscription, Straggler, StragglerWatch
from lockstep.train.monitoring.report_interval import Times
from lockstep.world.world import World

DIGITS = 6  # of seconds in records
MIN_SECONDS = 1.0  # shorter reports are joined, because a scheduler can favor a worker for a moment


class WorkerTimes:
    """Collective, like its `report`.

    Args:
        waits_in: The phases in which a worker may wait for others, so that they do not show which one is slow.
    """

    def __init__(self, world: World, waits_in: Collection[Phase]):
        self._world = world
        self._own = [number for number, phase in enumerate(PHASES) if phase not in waits_in]
        self._watch = StragglerWatch(world.gather(socket.gethostname()))
        self._last = torch.zeros(world.size, len(PHASES), dtype=torch.float64, device="cpu")
        self._epoch = torch.zeros_like(self._last)
        self._oversubscription = Oversubscription()
        self._begin_window()

    def forget(self) -> None:
        """Compare only the steps from now on, and name slow workers again: for a rewind."""
        self._watch.forget()
        self._begin_window()

    def _begin_window(self) -> None:
        self._window = torch.zeros_like(self._last)
        self._window_steps, self._window_seconds = 0, 0.0

    def report(self, times: Times, steps: int) -> list[Straggler]:
        """Gather the times of the last steps, and return the workers to name, on rank 0."""
        own = [*(times.phases[phase] for phase in PHASES), self._oversubscription.check()]
        rows = self._world.rows(torch.tensor(own, dtype=torch.float64, device="cpu"))
        seconds = rows[:, :-1]
        self._last = seconds / max(1, steps)
        self._epoch = self._epoch + seconds
        self._window = self._window + seconds
        self._window_steps += steps
        self._window_seconds += times.seconds
        if self._window_seconds < MIN_SECONDS or not self._world.is_main or self._world.size == 1:
            return []
        count = max(1, self._window_steps)
        per_step = self._window / count
        phases: dict[str, Sequence[float]] = {PHASES[number]: per_step[:, number].tolist() for number in self._own}
        oversubscribed = [bool(each) for each in rows[:, -1]]
        found = self._watch.update(phases, self._window_seconds / count, count, oversubscribed)
        self._begin_window()
        return found

    def spread(self) -> dict[str, dict[str, Any]]:
        """Return the range over the workers of each phase of the last report, in seconds per step."""
        if self._world.size == 1:
            return {}
        columns = zip(PHASES, self._last.T.tolist(), strict=True)
        return {phase: _range(column) for phase, column in columns if any(column)}

    def take_epoch(self) -> dict[str, list[float]]:
        """Return the seconds of each phase since the last call, by worker."""
        taken, self._epoch = self._epoch, torch.zeros_like(self._epoch)
        columns = zip(PHASES, taken.T.tolist(), strict=True)
        return {phase: [round(each, DIGITS) for each in column] for phase, column in columns if any(column)}


def _range(seconds: Sequence[float]) -> dict[str, Any]:
    low, middle, high = (round(each, DIGITS) for each in (min(seconds), median(seconds), max(seconds)))
    return {"min": low, "median": middle, "max": high, "slowest": max(range(len(seconds)), key=seconds.__getitem__)}
