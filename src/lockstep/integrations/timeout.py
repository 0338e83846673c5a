"""A time limit for several activities."""

from __future__ import annotations

import time


class TimeoutException(Exception):
    """The time is over."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A limit that begins now.

    Args:
        timeout: Seconds.
        message: What to say when it is over; `{activity}` stands for what was waited for.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._seconds = timeout
        self._message = message
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        """Seconds left."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether it is over."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException if it is over."""
        if self.timed_out():
            said = self._message.format(activity=activity).rstrip().removesuffix(".")
            raise TimeoutException(f"{said}. Timeout after {self._seconds} seconds.")
