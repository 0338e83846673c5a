"""How many cores of this machine are busy, and whether it has more busy threads than cores."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
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
        self._last = Reading.now()

    def check(self) -> bool:
        """Return the result of the last interval."""
        if time.monotonic() - self._last.time_seconds >= INTERVAL_SECONDS:
            last, self._last = self._last, Reading.now()
            self._is_found = self._last.is_busy_since(last)
        return self._is_found


class BusyCores:
    """Measures how many of this machine's cores are busy, whichever programs use them."""

    def __init__(self) -> None:
        self._last = Reading.now()

    def take(self) -> float:
        """Return the mean number since the last call."""
        last, self._last = self._last, Reading.now()
        return self._last.busy_cores_since(last)


@dataclass(frozen=True)
class Reading:
    """The machine's counters at a time."""

    time_seconds: float
    waited_seconds: float | None  # in which at least one thread waited for a core; None if unknown
    idle_seconds: float  # of all cores
    load: float  # of the last minute, if `waited_seconds` is unknown
    cores: int

    @classmethod
    def now(cls) -> Reading:
        """Read the counters."""
        times, waited = psutil.cpu_times(), waited_seconds(PRESSURE)
        idle, load = float(times.idle + getattr(times, "iowait", 0.0)), os.getloadavg()[0] if waited is None else 0.0
        return cls(time.monotonic(), waited, idle, load, os.cpu_count() or 1)

    def busy_cores_since(self, last: Reading) -> float:
        """Return the mean number of busy cores since an earlier reading."""
        seconds = max(self.time_seconds - last.time_seconds, 1e-3)
        return round(min(max(0.0, self.cores - (self.idle_seconds - last.idle_seconds) / seconds), self.cores), 2)

    def is_busy_since(self, last: Reading) -> bool:
        """Return whether there were more busy threads than cores since an earlier reading."""
        seconds = self.time_seconds - last.time_seconds
        if self.waited_seconds is None or last.waited_seconds is None:
            waits = self.load > self.cores
        else:
            waits = self.waited_seconds - last.waited_seconds > WAITING * seconds
        return waits and self.idle_seconds - last.idle_seconds < IDLE * seconds * self.cores


def waited_seconds(path: Path) -> float | None:
    """Return for how long at least one thread has waited for a core, from a file such as PRESSURE, if it is known."""
    try:
        return int(path.read_text().partition("total=")[2].split()[0]) / 1e6
    except (OSError, ValueError, IndexError):
        return None
