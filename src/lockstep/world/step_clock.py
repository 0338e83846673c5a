"""Times the phases of training steps, and publishes the current one for diagnosing hangs.

Times are those of the CPU clock or, on a device with streams, of events in its current stream, which are read later, so
that steps hardly ever wait for the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from lockstep.diagnosis.board import FINISHED, TRAINER, Board
from lockstep.diagnosis.phases import WAITING, Phase, Phases
from lockstep.world import accelerator

if TYPE_CHECKING:
    import torch

MAX_MARKS = 512  # of steps that are not yet read; at more, about half of them are read
MAX_STEP_MARKS = 2000  # in one step of a script; time after them counts as waiting
AT_ONCE = 0.2  # share of a host's wait that its phase takes on the device, at most
MAX_STEPS = 1000  # of a script, between two calls of `take_ready`; earlier ones are dropped


# The phase that starts, the device's time and the host's, and whether the device has earlier work left.
Mark = tuple[Phase | None, Any, float, bool]


class DeviceClock:
    """Times the work of a device without blocking the host."""

    def __init__(self, device: torch.device):
        self.device = device
        self.has_streams = accelerator.overlaps(device)

    def now(self) -> Any:
        """Return a timestamp after all work submitted to the device so far."""
        if not self.has_streams:
            return time.perf_counter()
        return accelerator.timestamp(self.device)

    def wait_for(self, timestamp: Any) -> None:
        """Wait until the device has reached a timestamp."""
        if self.has_streams:
            timestamp.synchronize()

    @property
    def has_time(self) -> bool:
        """Whether timestamps can be taken now: not while the current stream is capturing a graph."""
        return not (self.has_streams and accelerator.is_capturing(self.device))

    def is_reached(self, timestamp: Any) -> bool:
        """Whether the device has reached a timestamp."""
        return not self.has_streams or bool(timestamp.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two timestamps, both of which the device has reached."""
        return float(start.elapsed_time(end)) / 1000 if self.has_streams else float(end - start)


class StepClock:
    """Called when a phase of a step starts, which ends the previous one, and when the step ends.

    Any thread may call it.

    Args:
        device: None: nothing is measured until `clock` is set.
        board: Where the trainer publishes each phase.
        first: The phase with which a step starts where the previous one ends. The first step is then not measured.
            None: the time between two steps is not counted.

    Attributes:
        follower: The clock of a study that measures the trainer's steps, which begins the same phases.
    """

    def __init__(
        self, device: torch.device | None = None, board: Board | None = None, first: Phase | None = None
    ) -> None:
        self.clock = DeviceClock(device) if device is not None else None
        self.follower: StepClock | None = None
        self._board = board
        self._first = first
        self._lock = threading.Lock()  # autograd's threads start phases, too
        self._phase: Phase | None = None
        self.pauses = 0
        self._waiting = 0  # number of threads that wait for other workers
        self._marks: list[Mark] = []  # the starts of phases in the current step
        self._unread: deque[list[Mark]] = deque()  # of earlier steps, each with the step's end
        self._host_waits = [0.0, 0]  # seconds, and the number of steps in which they were
        self._steps: deque[Phases] = deque(maxlen=MAX_STEPS if first else None)
        if board:
            board.set_flag(TRAINER)
            board.set_flag(FINISHED, False)

    def begin(self, phase: Phase) -> None:
        """Start a phase of the step, unless it is the current one."""
        if self.follower:
            self.follower.begin(phase)
        with self._lock:
            if phase == self._phase or (self._first and not self._marks):
                return
            self._phase = phase
            if not self._waiting:
                self._mark(phase)
        if self._board:
            self._board.report(phase)

    def _mark(self, phase: Phase) -> None:
        if self._first and len(self._marks) >= MAX_STEP_MARKS:
            phase = WAITING
        if self.clock is None or not self.clock.has_time:
            return
        if not (self._marks and self._marks[-1][0] == phase):
            self._marks.append(self._take_mark(self.clock, phase, self.clock.now()))

    def _take_mark(self, clock: DeviceClock, phase: Phase | None, now: Any) -> Mark:
        """Return a mark with the host's time, and whether the device still has work from before the last mark."""
        if not clock.has_streams:
            return phase, now, 0.0, False
        return phase, now, time.perf_counter(), bool(self._marks) and not clock.is_reached(self._marks[-1][1])

    def pause(self) -> None:
        """Count the time as waiting, before this thread waits for other workers."""
        with self._lock:
            self._waiting += 1
            self.pauses += 1
            if self._phase:
                self._mark(WAITING)

    def resume(self) -> None:
        """Continue the phase, after the wait."""
        with self._lock:
            self._waiting -= 1
            if self._phase and not self._waiting:
                self._mark(self._phase)

    def end(self) -> None:
        """End the step."""
        with self._lock:
            if self.clock is None:
                return
            if self.clock.has_time:
                self._end(self.clock, self.clock.now())
            else:  # timestamps of this step may be part of a graph, and cannot be read
                self._marks, self._phase = [], None
        if self._board:
            self._board.report("running")

    def _end(self, clock: DeviceClock, now: Any) -> None:
        if self._marks:
            end = self._take_mark(clock, None, now)
            self._unread.append([*self._marks, end])
            first = WAITING if self._waiting else self._first
            self._marks = [(first, *end[1:])] if self._first else []
        elif self._first:
            self._marks = [self._take_mark(clock, WAITING if self._waiting else self._first, now)]
        self._phase = self._first
        self._read_reached(clock)
        if sum(map(len, self._unread)) > MAX_MARKS and len(self._unread) > 1:
            half = len(self._unread) // 2
            marks = [mark for step in islice(self._unread, half) for _, mark, *_ in step]
            for mark in reversed(marks):  # waits once, unless there are several streams
                if not clock.is_reached(mark):
                    clock.wait_for(mark)
            for _ in range(half):
                self._read(clock)

    def _read_reached(self, clock: DeviceClock) -> None:
        """Read the steps that the device has finished."""
        # Another thread may use another stream, so the end of a step may be reached before its other marks.
        while self._unread and all(clock.is_reached(mark) for _, mark, *_ in reversed(self._unread[0])):
            self._read(clock)

    def _read(self, clock: DeviceClock) -> None:
        """Read the oldest unread step."""
        step: dict[Phase, float] = {}
        self._host_waits[1] += 1
        for (phase, start, before, was_behind), (_, end, after, is_behind) in pairwise(self._unread.popleft()):
            if phase is not None:
                seconds = clock.seconds(start, end)
                step[phase] = step.get(phase, 0.0) + seconds
                # The host came here before the device, and left when the device had nothing left to do.
                if was_behind and not is_behind and seconds < AT_ONCE * (after - before):
                    self._host_waits[0] += after - before - seconds
        self._steps.append(step)

    def take_host_wait(self) -> float:
        """Return the mean seconds of a step in which the host waited for the device, since the last call."""
        with self._lock:
            seconds, steps = self._host_waits
            self._host_waits = [0.0, 0]
            return seconds / max(steps, 1)

    def take(self) -> Sequence[Phases]:
        """Return the seconds of each phase for every step that ended since the last call; waits for the device."""
        with self._lock:
            if self.clock is not None:
                accelerator.synchronize(self.clock.device)
                while self._unread:
                    self._read(self.clock)
            return self._take()

    def take_ready(self) -> Sequence[Phases]:
        """Return the steps that the device has finished since the last call."""
        with self._lock:
            if self.clock is not None and self.clock.has_time:
                self._read_reached(self.clock)
            return self._take()

    def _take(self) -> Sequence[Phases]:
        steps = list(self._steps)
        self._steps.clear()
        return steps

    def forget(self) -> None:
        """Discard all times so far."""
        with self._lock:
            self._marks, self._phase = [], None
            self._unread.clear()
            self._steps.clear()
