"""Record a worker's I/O over time, in a thread that takes a sample every few seconds.

Workers do not wait for one another: each writes its own file in the run folder, and `lockstep.files.io_records` sums
them. A sample costs 1.5 ms of CPU time with 75 processes on the node (15 us per process to find the worker's children),
and up to 1.3 ms more for the node's devices: every 5 s, 0.03 to 0.06 % of one core.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from lockstep.files.io_records import KIND, worker_file
from lockstep.files.jsonl import RecordWriter
from lockstep.train.monitoring.io_counters import CountersMissingError, IoCounters
from lockstep.world.world import World

MISSING = "no I/O records: this platform does not count the I/O of a process (Linux does, in /proc/PID/io)"


class IoSampler:
    """Counts from its creation on; the base class counts nothing."""

    notes: tuple[str, ...] = ()

    @contextmanager
    def recording(self, run: Path) -> Iterator[None]:
        """Append records to the worker's file in a run folder, until the block ends."""
        yield


class _Missing(IoSampler):
    notes = (MISSING,)


class _Counting(IoSampler):
    def __init__(self, counters: IoCounters, rank: int, every_seconds: float):
        self._counters, self._rank, self._every = counters, rank, every_seconds
        self._since = time.monotonic()

    @contextmanager
    def recording(self, run: Path) -> Iterator[None]:
        path, over = worker_file(run, self._rank), threading.Event()
        thread = threading.Thread(target=self._record, args=(path, over), name="io", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _record(self, path: Path, over: threading.Event) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(RecordWriter(path)) as writer:
                while not over.wait(self._every):
                    self._sample(writer)
                self._sample(writer)
        except (OSError, CountersMissingError) as error:  # a full disk must not stop training
            logging.getLogger("lockstep").warning("I/O recording stopped: %r", error)

    def _sample(self, writer: RecordWriter) -> None:
        amounts, now = self._counters.take(), time.monotonic()
        seconds, self._since = now - self._since, now
        times = {"unix_time": time.time(), "seconds": round(seconds, 6)}
        writer.write({"kind": KIND, "rank": self._rank, **times, **amounts})


def start_counting(every_seconds: float, world: World) -> IoSampler:
    """Start counting this worker's I/O; local rank 0 also counts the node's devices.

    Args:
        every_seconds: Seconds between two records; 0: no records.
    """
    if not every_seconds:
        return IoSampler()
    try:
        counters = IoCounters(node=world.rank_info.local_rank == 0)
    except CountersMissingError:
        return _Missing()
    return _Counting(counters, world.rank, every_seconds)
