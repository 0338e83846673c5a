"""This worker's own time in each phase of its training steps, without its waiting for other workers.

On a device with streams, times come from events in the stream, which are read when the device has reached them.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lockstep.world.device_clock import DeviceClock

BEFORE_BACKWARD = "before_backward"  # from the end of the previous step to the last backward pass's first gradient
BACKWARD = "backward"
OPTIMIZER = "optimizer"  # from the reduced gradients to the end of the step
PHASES = (BEFORE_BACKWARD, BACKWARD, OPTIMIZER)
REDUCTION = ""  # no phase: the optimizer waits for the reduced gradients
STEP = "step"  # the whole step, waiting included
STEPS = "steps"  # the number of steps
LONGEST = 0.05  # share of the longest steps that do not count, such as those with an evaluation or a checkpoint
MAX_STEPS = 1000  # between two calls of `take`; earlier ones are dropped
MAX_UNREAD = 64  # steps that the device has not finished; more are not measured
MAX_SPANS = 1000  # uninterrupted parts of phases in one step; more are not counted


class StepTimes:
    """Measures the steps of the gradient optimizers of the global process set.

    Several optimizers share one sequence of steps. The first step is not measured; without a clock, no step is.
    """

    def __init__(self) -> None:
        self.clock: DeviceClock | None = None
        self._lock = threading.Lock()  # autograd's threads enter phases too
        self._phase = REDUCTION
        self._since: Any = None  # start of the current span; None without a phase, and while a thread waits
        self._waiting = 0  # number of threads that wait for other workers
        self._started: Any = None  # start of the current step; None before the end of the first one
        self._spans: list[tuple[str, Any, Any]] = []  # of the current step
        self._unread: deque[tuple[Any, Any, list[tuple[str, Any, Any]]]] = deque()
        self._steps: deque[dict[str, float]] = deque(maxlen=MAX_STEPS)

    def enter(self, phase: str) -> None:
        """End the current phase and start the next one."""
        if self.clock is not None and self._started is not None:
            self._enter(phase, self.clock.now())

    def _enter(self, phase: str, now: Any) -> None:
        with self._lock:
            self._end_span(now)
            self._phase = phase
            self._since = now if phase and not self._waiting else None

    def _end_span(self, now: Any) -> None:
        if self._since is not None and len(self._spans) < MAX_SPANS:
            self._spans.append((self._phase, self._since, now))
        self._since = None

    def pause(self) -> None:
        """Stop measuring, before this thread waits for other workers."""
        with self._lock:
            self._waiting += 1
            if self._since is not None and self.clock is not None:
                self._end_span(self.clock.now())

    def resume(self) -> None:
        """Continue the phase, after the wait."""
        with self._lock:
            self._waiting -= 1
            if self._phase and not self._waiting and self.clock is not None:
                self._since = self.clock.now()

    def end_step(self) -> None:
        """End a step and start the next one."""
        if self.clock is None:
            return
        if not self.clock.has_time:  # timestamps of this step may be part of a graph, and cannot be read
            self._started, self._since, self._phase, self._spans = None, None, REDUCTION, []
            return
        now = self.clock.now()
        self._enter(BEFORE_BACKWARD, now)
        if self._started is not None and len(self._unread) < MAX_UNREAD:
            self._unread.append((self._started, now, self._spans))
        self._started, self._spans = now, []
        while self._unread and self._is_reached(*self._unread[0][1:]):
            started, ended, spans = self._unread.popleft()
            seconds = dict.fromkeys(PHASES, 0.0) | {STEP: self.clock.seconds(started, ended)}
            for phase, start, end in spans:
                seconds[phase] += self.clock.seconds(start, end)
            self._steps.append(seconds)

    def _is_reached(self, ended: Any, spans: Sequence[tuple[str, Any, Any]]) -> bool:
        """Return whether the device has reached all timestamps of a step; another thread may use another stream."""
        assert self.clock is not None
        return all(self.clock.is_reached(each) for each in (ended, *(end for _, _, end in spans)))

    def take(self, at_least: int) -> dict[str, float] | None:
        """Return the seconds per step of each phase, and of `STEP`, since the last call; any thread may call this.

        Returns:
            Means without the longest steps, and the number of `STEPS`; or None if fewer than `at_least` steps have been
            measured.
        """
        count = len(self._steps)
        if count < at_least:
            return None
        steps = [self._steps.popleft() for _ in range(count)]
        means = {name: _mean_without_longest([step[name] for step in steps]) for name in (*PHASES, STEP)}
        return means | {STEPS: count}


def _mean_without_longest(values: Sequence[float]) -> float:
    return fmean(sorted(values)[: len(values) - math.ceil(LONGEST * len(values))])
