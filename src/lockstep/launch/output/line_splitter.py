"""A worker's bytes, cut into whole lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_BYTES = 1 << 20  # a longer line is cut
BAR_SECONDS = 2.0  # how often a progress bar, which overwrites its own line, is shown as a line


@dataclass
class Lines:
    """Cuts a stream of bytes into whole lines.

    Of a line that carriage returns overwrite, the state that stays is a line; before that, one every BAR_SECONDS.
    """

    clock: Callable[[], float] = time.monotonic
    held: bytes = b""
    shown: bytes = b""
    shown_at: float = float("-inf")

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that this chunk completes, each with its line feed."""
        *whole, self.held = (self.held + chunk).split(b"\n")
        if len(self.held) > LONGEST_BYTES:
            whole, self.held = [*whole, self.held], b""
        lines = [line for text in whole for line in self._complete(text)]
        overwritten, bar, rest = self.held.rpartition(b"\r")
        if bar:
            state = _what_stays(overwritten)
            self.held = state + bar + rest
            if state not in (b"", self.shown) and self.clock() - self.shown_at >= BAR_SECONDS:
                self.shown, self.shown_at = state, self.clock()
                lines.append(state + b"\n")
        return lines

    def rest(self) -> list[bytes]:
        """The last line of a stream that ends without a line feed."""
        text, self.held = self.held, b""
        return self._complete(text) if text else []

    def _complete(self, text: bytes) -> list[bytes]:
        line, shown = _what_stays(text), self.shown
        self.shown, self.shown_at = b"", float("-inf")
        return [] if shown and line == shown else [line + b"\n"]


def _what_stays(text: bytes) -> bytes:
    """What a terminal shows in the end of a line with carriage returns; that of "\\r\\n" counts for nothing."""
    return next((state for state in reversed(text.split(b"\r")) if state), b"")
