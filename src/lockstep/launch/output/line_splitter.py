"""Split a worker's output into lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_BYTES = 1 << 20  # longer lines are split
BAR_SECONDS = 2.0  # interval at which a progress bar, which overwrites its line, is shown as a line


@dataclass
class Lines:
    """Splits a stream of bytes into lines.

    If a line is overwritten after carriage returns, return its last state, and before that one state per BAR_SECONDS.
    """

    clock: Callable[[], float] = time.monotonic
    held: bytes = b""
    shown: bytes = b""
    shown_at: float = float("-inf")

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that this chunk completes, each with its line feed."""
        *whole, self.held = (self.held + chunk).split(b"\n")
        if len(self.held) > LONGEST_BYTES:
            whole, self.held = [*whole, self.held], b""
        lines = [line for text in whole for line in self._complete(text)]
        overwritten, bar, rest = self.held.rpartition(b"\r")
        if bar:
            state = _last_state(overwritten)
            self.held = state + bar + rest
            if state not in (b"", self.shown) and self.clock() - self.shown_at >= BAR_SECONDS:
                self.shown, self.shown_at = state, self.clock()
                lines.append(state + b"\n")
        return lines

    def rest(self) -> list[bytes]:
        """Return the last line of a stream that ends without a line feed."""
        text, self.held = self.held, b""
        return self._complete(text) if text else []

    def _complete(self, text: bytes) -> list[bytes]:
        line, shown = _last_state(text), self.shown
        self.shown, self.shown_at = b"", float("-inf")
        return [] if shown and line == shown else [line + b"\n"]


def _last_state(text: bytes) -> bytes:
    """Return what a terminal finally shows of a line with carriage returns, ignoring the one of "\\r\\n"."""
    return next((state for state in reversed(text.split(b"\r")) if state), b"")
