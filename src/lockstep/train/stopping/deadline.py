"""When a run must begin to stop, so that its checkpoint is written before its time is over.

A worker looks at its clock once a round: a step of training, or a batch of an evaluation. What it lets pass now, it can
prevent at the next look at the earliest, and that stop comes after another round and the checkpoint. So it asks for a
stop as soon as less time is left than the longest time between two looks, the longest round and the longest write of a
checkpoint together, and a reserve. The clock is a monotonic one: it does not matter if somebody sets the machine's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

RESERVE_SECONDS = 60.0  # for what nobody has measured yet: the first checkpoint, the end of trackers and processes
RESERVE_SHARE = 0.25  # of a time so short that this is less


class Deadline:
    """The end of the time that a run has, as one worker sees it.

    Args:
        seconds: The time left from now on; without end by default.
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = clock() + seconds
        self._reserve = min(RESERVE_SECONDS, RESERVE_SHARE * seconds)
        self._looked = math.nan
        self._between, self._round, self._write = _Longest(), _Longest(), _Longest()

    def is_near(self) -> bool:
        """Whether a stop has to be asked for now, at the beginning of a round."""
        now = self._clock()
        if not math.isnan(self._looked):
            self._between.add(now - self._looked)
        self._looked = now
        margin = self._between.seconds + self._round.seconds + self._write.seconds + self._reserve
        return now + margin >= self._end

    def end_round(self) -> None:
        """The round that began with the last look is over."""
        if not math.isnan(self._looked):
            self._round.add(self._clock() - self._looked)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A checkpoint is written while the block runs."""
        start = self._clock()
        yield
        self._write.add(self._clock() - start)


class _Longest:
    """The longest of several times; the first, which compiles and warms up, counts as long as it is the only one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        self._count += 1
        self.seconds = seconds if self._count <= 2 else max(self.seconds, seconds)
