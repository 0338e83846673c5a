"""Waits of tests for what other threads do."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

SECONDS = 60.0  # of a test that has failed


def until(is_true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Lines(io.StringIO):
    """A stream, for `redirect_stderr`, whose text can be waited for while other threads write."""

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.getvalue())
