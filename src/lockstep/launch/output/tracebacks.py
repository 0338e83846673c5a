"""Tracebacks in what workers write to stderr: held back, so that the one that ended the job is read last, and once.

Programs print a traceback as their last words, but also, in a log, of errors that they have dealt with. So a traceback
and all that follows it wait until the worker ends, or a few seconds, and are then shown like any other lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FIRST_LINE = b"Traceback (most recent call last):"
HOLD_SECONDS = 10.0
HOLD_BYTES = 1 << 20


@dataclass
class Tracebacks:
    """One worker's: `held` are the lines that wait, since `since`."""

    clock: Callable[[], float] = time.monotonic
    held: list[bytes] = field(default_factory=list)
    since: float = float("inf")

    def feed(self, lines: Sequence[bytes]) -> list[bytes]:
        """The lines that can be shown now."""
        if not self.held:
            first = next((index for index, line in enumerate(lines) if FIRST_LINE in line), len(lines))
            shown, self.held = list(lines[:first]), list(lines[first:])
            if self.held:
                self.since = self.clock()
            return shown
        self.held += lines
        return self.release() if sum(map(len, self.held)) > HOLD_BYTES else []

    def due(self) -> list[bytes]:
        """What has waited long enough."""
        return self.release() if self.held and self.clock() - self.since >= HOLD_SECONDS else []

    def release(self) -> list[bytes]:
        """All that waits."""
        lines, self.held, self.since = self.held, [], float("inf")
        return lines
