"""Delay tracebacks on the workers' stderr, so that the one that ended the job is shown last, and once.

A program prints a traceback when it fails, but also logs tracebacks of errors that it has handled. So a traceback and
the lines after it wait until the worker exits, or for a few seconds, and are then shown like other lines.
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
    """The delayed lines of one worker: `held`, since the time `since`."""

    clock: Callable[[], float] = time.monotonic
    held: list[bytes] = field(default_factory=list)
    since: float = float("inf")

    def feed(self, lines: Sequence[bytes]) -> list[bytes]:
        """Return the lines that can be shown now."""
        if not self.held:
            first = next((index for index, line in enumerate(lines) if FIRST_LINE in line), len(lines))
            shown, self.held = list(lines[:first]), list(lines[first:])
            if self.held:
                self.since = self.clock()
            return shown
        self.held += lines
        return self.release() if sum(map(len, self.held)) > HOLD_BYTES else []

    def due(self) -> list[bytes]:
        """Return the lines that have waited long enough."""
        return self.release() if self.held and self.clock() - self.since >= HOLD_SECONDS else []

    def release(self) -> list[bytes]:
        """Return all delayed lines."""
        lines, self.held, self.since = self.held, [], float("inf")
        return lines
