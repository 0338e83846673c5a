"""A time limit for several activities."""

from __future__ import annotations

import time


class TimeoutException(Exception):
    """The time limit has passed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A time limit that starts now.

    Args:
        timeout: The limit in seconds.
        message: The exception's message; `{activity}` is replaced by the argument of `check_time_out_for`.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._seconds = timeout
        self._message = message
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        """Return the remaining seconds."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Return whether the limit has passed."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException if the limit has passed."""
        if self.timed_out():
            text = self._message.format(activity=activity).rstrip().removesuffix(".")
            raise TimeoutException(f"{text}. Timeout after {self._seconds} seconds.")
