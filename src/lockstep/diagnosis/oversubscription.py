"""Whether this machine has more busy threads than cores."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

WAITING = 0.4  # share of the time in which a thread waits for a core: 0.7 with 3 busy threads on 2 cores, 0.01 with 2
IDLE = 0.1  # of the cores' time; with more, no thread waits long
INTERVAL_SECONDS = 1.0
PRESSURE = Path("/proc/pressure/cpu")  # Linux 4.20 and later, but not everywhere


class Oversubscription:
    """Measures, once a second at most, whether this machine has more busy threads than cores.

    That is so if its cores are hardly idle and the kernel reports that threads wait for them (man 5 proc,
    /proc/pressure); without such reports, if the load average exceeds the number of cores.
    """

    def __init__(self) -> None:
        self._is_found = False
        self._time, self._waited, self._idle = time.monotonic(), _waited_seconds(), _idle_seconds()

    def check(self) -> bool:
        """Return the result of the last interval."""
        now = time.monotonic()
        seconds = now - self._time
        if seconds >= INTERVAL_SECONDS:
            waited, idle = _waited_seconds(), _idle_seconds()
            cores = os.cpu_count() or 1
            if waited is None or self._waited is None:
                waits = os.getloadavg()[0] > cores
            else:
                waits = waited - self._waited > WAITING * seconds
            self._is_found = waits and idle - self._idle < IDLE * seconds * cores
            self._time, self._waited, self._idle = now, waited, idle
        return self._is_found


def _waited_seconds() -> float | None:
    """Return for how long at least one thread has waited for a core since the system's start, if that is known."""
    try:
        return int(PRESSURE.read_text().partition("total=")[2].split()[0]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


def _idle_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))
