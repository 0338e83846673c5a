"""Adds up what energy counters count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from lockstep.energy.counters import EnergyCounter, Found

MAX_WATTS = 1000.0  # of a package or its memory; more means that its counter was reset
SLACK_SECONDS = 1.0  # counters are updated at intervals of their own


class EnergyMeter:
    """Counts from its creation on. A thread reads counters that wrap around before they can do so twice.

    Attributes:
        joules: Of each counter since the last call of `take` that has returned it.
        unread: What is not counted, and why: also the time in which a counter went back, and one that fails.
    """

    def __init__(self, found: Found, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters, self.unread = found[0], list(found[1])
        self.joules = dict.fromkeys((counter.name for counter in self.counters), 0.0)
        self._clock, self._failed = clock, set[str]()
        self._last: dict[str, tuple[float, float]] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self.update()
        if ranges := [counter.range_joules for counter in self.counters if counter.range_joules]:
            threading.Thread(target=self._keep_up, args=(min(ranges) / MAX_WATTS / 2,), daemon=True).start()

    def _keep_up(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            self.update()

    def close(self) -> None:
        self._ended.set()

    def update(self) -> None:
        with self._lock:
            for counter in self.counters:
                try:
                    if counter.name not in self._failed:
                        self._add(counter, counter.read())
                except Exception as error:  # also a library's own
                    self._failed.add(counter.name)
                    self.unread.append(f"{counter.name}: not counted from now on: {error}")

    def _add(self, counter: EnergyCounter, value: float) -> None:
        now, span = self._clock(), counter.range_joules
        last, before = self._last.get(counter.name, (value, now))
        self._last[counter.name] = value, now
        seconds, added = now - before, value - last
        most = (seconds + SLACK_SECONDS) * MAX_WATTS
        if span and most > span:
            self.unread.append(f"{counter.name}: {seconds:.0f} s: it may have wrapped around more than once")
            return
        if added < 0 and added + span <= most:
            added += span
        if added < 0:
            self.unread.append(f"{counter.name}: {seconds:.0f} s, in which it went back to {value:.6g} J")
            return
        self.joules[counter.name] += added

    def take(self, gpus: Collection[str] | None = None) -> dict[str, float]:
        """Return the joules of each kind since the last call; of GPUs, only those at these PCI addresses, if given."""
        self.update()
        sums: dict[str, float] = {}
        for counter in self.counters:
            if _is_used(counter, gpus):
                sums[counter.kind] = sums.get(counter.kind, 0.0) + self.joules[counter.name]
                self.joules[counter.name] = 0.0
        return sums

    def gpu_use(self, gpus: Collection[str] | None = None) -> list[float]:
        """Return in which share of the last moment the GPUs at these PCI addresses computed, of those that show it."""
        found = []
        for counter in self.counters:
            if counter.busy and _is_used(counter, gpus):
                with suppress(Exception):  # a library's own
                    found.append(counter.busy())
        return found

    def take_unread(self) -> list[str]:
        """Return what is not counted, and has not been returned before."""
        unread, self.unread = self.unread, []
        return unread


def _is_used(counter: EnergyCounter, gpus: Collection[str] | None) -> bool:
    """Return whether to count for the GPUs at these PCI addresses; None: for all."""
    return gpus is None or counter.kind != "gpu" or (counter.address in gpus if counter.address else bool(gpus))
