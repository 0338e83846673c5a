"""Time limits of tests, in seconds of an idle machine: they grow with the load, as any program takes longer then.

A limit ends a test that hangs, and measures nothing. Everything in the tests that waits for progress uses this module,
and so do the limits of pytest-timeout. A limit of the product that must not strike by chance is `scaled`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import psutil
import pytest

from lockstep.world.devices import usable_cores

LIMIT_SECONDS = 150.0
PAUSE_SECONDS = 0.02
MAX_PAUSE_SECONDS = 0.2
T = TypeVar("T")


def load() -> float:
    """Return how many processes competed for a core in the last minutes; at least 1."""
    return max(1.0, max(os.getloadavg()[:2]) / usable_cores())


def scaled(seconds: float) -> float:
    """Return what an idle machine's seconds are on this machine at present."""
    return seconds * load()


class Limit:
    """A time limit that starts now, and grows while the load does."""

    def __init__(self, seconds: float = LIMIT_SECONDS) -> None:
        self._seconds, self._start = seconds, time.monotonic()

    def left(self) -> float:
        """Return the remaining seconds; 0 if there are none."""
        return max(0.0, scaled(self._seconds) - (time.monotonic() - self._start))


def wait_until(
    holds: Callable[[], T],
    seconds: float = LIMIT_SECONDS,
    explain: Callable[[], object] = lambda: "",
    pause: float = PAUSE_SECONDS,
) -> T:
    """Wait until the condition returns a true value; return that value. It takes at most a fifth of a core.

    Raises:
        AssertionError: It did not in this time, with what `explain` returns.
    """
    limit, begun = Limit(seconds), time.monotonic()
    while not (found := holds()):
        assert limit.left(), f"not within {seconds:.0f} s: {explain()}"
        time.sleep(max(pause, min(4 * (time.monotonic() - begun), MAX_PAUSE_SECONDS)))
        begun = time.monotonic()
    return found


def wait_for_ends(processes: Iterable[psutil.Process]) -> None:
    """Wait until all these processes have ended."""
    running = [*processes]
    wait_until(lambda: not psutil.wait_procs(running, timeout=0)[1], explain=lambda: running)


def extended(wait: Callable[[float], T], seconds: float = LIMIT_SECONDS) -> T:
    """Call `wait(timeout)`, such as a process's `wait`; call it again where the load has extended the limit.

    Raises:
        subprocess.TimeoutExpired: It did not return in this time.
    """
    limit = Limit(seconds)
    while True:
        try:
            return wait(limit.left())
        except subprocess.TimeoutExpired:
            if not limit.left():
                raise


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, object, object]:
    """Extend the time limit of a test, which pytest-timeout ends by SIGALRM."""
    result = yield
    strike, limit = signal.getsignal(signal.SIGALRM), Limit(settings.timeout)

    def extend(number: int, frame: Any) -> None:
        if left := limit.left():
            signal.setitimer(signal.ITIMER_REAL, left)
        elif callable(strike):
            strike(number, frame)

    if callable(strike):
        signal.signal(signal.SIGALRM, extend)
    return result
