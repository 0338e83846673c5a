"""How long workers of one host have made no progress.

A host stands still if none of its workers reports progress and none shows a sign of life. A sign of life is CPU time
of a worker's descendants, files or pipes read or written, or CPU time of the worker itself while its stack changes: an
evaluation, a checkpoint or a compilation may take as long as it needs. Workers in a collective are not asked for signs:
they may spin. What happens during an inspection does not count: it may come from the inspection.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.diagnosis.board import ANSWERS, BoardContent
from lockstep.errors import require

HANG_TIMEOUT = "LOCKSTEP_HANG_TIMEOUT"
HANG_SECONDS = 300.0  # without progress; long evaluations and checkpoints show signs of life
TICK_SECONDS = 1.0
SAMPLES = 20  # of the signs of life, within the time limit; the stack is compared at each tick
CPU_SHARE = 0.05  # of one core
READING_SECONDS = 0.03  # by which CPU times that are read one after the other may differ: ticks of 10 ms
BYTES_PER_SECOND = 50e3  # more than logs and monitors take


def hang_limit(environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds without progress after which a job counts as hung, by LOCKSTEP_HANG_TIMEOUT; 0: never.

    Raises:
        ConfigError: The variable is not a number of seconds.
    """
    text = environment.get(HANG_TIMEOUT, f"{HANG_SECONDS:g}")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    require(seconds >= 0 and math.isfinite(seconds), HANG_TIMEOUT, repr(text), "0 or more seconds")
    return seconds


@dataclass(frozen=True)
class Activity:
    """What a process and its descendants have used so far: CPU seconds, and bytes read and written (man 5 proc).

    The bytes are those of storage, and those of system calls of the main threads: the latter include file systems
    outside the page cache (GPFS, BeeGFS, FUSE), and other threads poll /proc and sockets all the time.
    """

    cpu_s: float
    bytes: int


def activity(pid: int, descendants: bool = True) -> Activity:
    """Return the activity of a process and, if asked for, of its living descendants."""
    processes = list[psutil.Process]()
    with suppress(psutil.Error):
        processes.append(psutil.Process(pid))
        processes += processes[0].children(recursive=True) if descendants else []
    cpu_s, total = 0.0, 0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()  # in user and system mode, and those of exited children
            cpu_s += sum(times[:4] if descendants else times[:2])
        with suppress(OSError, ValueError, KeyError):
            storage, calls = _io(f"/proc/{process.pid}/io"), _io(f"/proc/{process.pid}/task/{process.pid}/io")
            total += storage["read_bytes"] + storage["write_bytes"] + calls["rchar"] + calls["wchar"]
    return Activity(cpu_s, total)


def _io(path: str) -> dict[str, int]:
    lines = Path(path).read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


@dataclass
class _Life:
    """The last sample of a worker."""

    time: float
    own: Activity
    tree: Activity


class IdleClock:
    """Counts the seconds without progress or signs of life.

    Args:
        limit: The time that matters, in seconds; it determines how often `tick` should be called.
    """

    def __init__(self, limit: float, now: Callable[[], float] = time.monotonic) -> None:
        self._sample_seconds = limit / SAMPLES
        self.tick_seconds = min(TICK_SECONDS, self._sample_seconds)
        self._now, self._before, self._sampled = now, now(), 0.0
        self._idle = 0.0
        self._marks: dict[int, tuple[int, int, int]] = {}
        self._lives: dict[int, _Life] = {}
        self._fingerprints: dict[int, int] = {}
        self._changed: set[int] = set()  # processes whose stacks have changed since the last sample

    def tick(self, workers: Sequence[BoardContent]) -> float:
        """Return for how many seconds these workers have made no progress; 0 without workers."""
        now = self._now()
        self._idle += min(now - self._before, 2 * self.tick_seconds)  # this process may have been suspended
        self._before = now
        if not workers or self._has_moved(workers):
            self._idle = 0.0
        elif now - self._sampled >= self._sample_seconds:
            self._sampled = now
            if self._any_alive(workers):
                self._idle = 0.0
        return self._idle

    def resume(self, workers: Sequence[BoardContent], signaled: Set[int]) -> None:
        """Continue after an inspection of these workers, whose reading and writing does not count.

        Args:
            signaled: Processes that received a signal. It may have let a thread run that waited for the GIL and then
                published a sample as old as the hang, so only their reports count as progress.
        """
        self._before = self._sampled = self._now()
        for worker in workers:
            self._is_alive(worker)
            if worker.pid in signaled and worker.pid in self._marks:
                self._marks[worker.pid] = (self._marks[worker.pid][0], worker.enqueued, worker.completed)
                self._fingerprints[worker.pid] = worker.fingerprint
                self._changed.discard(worker.pid)

    def _has_moved(self, workers: Sequence[BoardContent]) -> bool:
        for worker in workers:
            if worker.fingerprint != self._fingerprints.get(worker.pid, worker.fingerprint):
                self._changed.add(worker.pid)
            self._fingerprints[worker.pid] = worker.fingerprint
        marks = {worker.pid: (worker.count, worker.enqueued, worker.completed) for worker in workers}
        moved, self._marks = marks != self._marks, marks
        return moved

    def _any_alive(self, workers: Sequence[BoardContent]) -> bool:
        """Return whether any worker that is not in a collective does something."""
        alive = [self._is_alive(worker) for worker in workers if worker.enqueued <= worker.completed]
        self._changed.clear()
        return any(alive)

    def _is_alive(self, worker: BoardContent) -> bool:
        now, before = self._now(), self._lives.get(worker.pid)
        own, tree = activity(worker.pid, descendants=False), activity(worker.pid)
        self._lives[worker.pid] = _Life(now, own, tree)
        if before is None:
            return False
        seconds = now - before.time
        others_cpu = (tree.cpu_s - own.cpu_s) - (before.tree.cpu_s - before.own.cpu_s)
        has_children_busy = others_cpu > max(CPU_SHARE * seconds, READING_SECONDS)
        has_io = tree.bytes - before.tree.bytes > BYTES_PER_SECOND * seconds
        is_busy = own.cpu_s - before.own.cpu_s > CPU_SHARE * seconds
        has_changed = worker.pid in self._changed or not worker.flags & ANSWERS  # the thread publishes changes
        return has_children_busy or has_io or (is_busy and has_changed)
