"""Stop early enough to checkpoint before the time limit.

A worker checks its clock once per round: a training step, or a batch of an evaluation. If it does not request a stop
now, it can do so only at the next check, and stopping then takes another round and a checkpoint. So it requests a stop
when the time left is less than the sum of the longest time between two checks, the longest round, the longest
checkpoint write and a reserve. The clock is monotonic, so setting the system clock has no effect.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

RESERVE_SECONDS = 60.0  # for unmeasured work: the first checkpoint, closing trackers, exiting processes
RESERVE_SHARE = 0.25  # of the time limit, if that is less than RESERVE_SECONDS


class Deadline:
    """The time limit of a run, on one worker.

    Args:
        seconds: The time left from now; unlimited by default.
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = clock() + seconds
        self._reserve = min(RESERVE_SECONDS, RESERVE_SHARE * seconds)
        self._checked = math.nan
        self._between, self._round, self._write = _Longest(), _Longest(), _Longest()

    def is_near(self) -> bool:
        """Return whether to request a stop now, at the start of a round."""
        now = self._clock()
        if not math.isnan(self._checked):
            self._between.add(now - self._checked)
        self._checked = now
        margin = self._between.seconds + self._round.seconds + self._write.seconds + self._reserve
        return now + margin >= self._end

    def end_round(self) -> None:
        """End the round that started with the last `is_near`."""
        if not math.isnan(self._checked):
            self._round.add(self._clock() - self._checked)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Surround the write of a checkpoint, to measure it."""
        start = self._clock()
        yield
        self._write.add(self._clock() - start)


class _Longest:
    """The longest of several times, ignoring the first (warm-up) once there is a second."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        self._count += 1
        self.seconds = seconds if self._count <= 2 else max(self.seconds, seconds)
