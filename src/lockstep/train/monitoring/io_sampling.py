"""Record a worker's I/O over time, in a thread that takes a sample every few seconds.

Workers do not wait for one another: each writes its own file in the run folder, and `lockstep.files.io_records` sums
them. A sample costs 1.5 ms of CPU time with 75 processes on the node (15 us per process to find the worker's children),
and up to 1.3 ms more for the node's devices: every 5 s, 0.03 to 0.06 % of one core.

Process counters come from Linux's /proc/PID/io (proc(5)): bytes requested by read and write calls, and bytes that
reached storage. The kernel adds a child's counters to its parent's on wait(), so the I/O of finished loader processes
is included. Finding the children reads two files per process on the node; these reads are counted separately, for the
counting thread, and subtracted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from lockstep.files.io_records import KIND, worker_file
from lockstep.files.jsonl import RecordWriter
from lockstep.world.world import World

Amounts = Counter[str]
_PROC_NAMES = {
    "rchar": "read_bytes",
    "syscr": "read_operations",
    "read_bytes": "storage_read_bytes",
    "wchar": "written_bytes",
    "syscw": "write_operations",
    "write_bytes": "storage_written_bytes",
}
_UNREADABLE = (NotImplementedError, OSError, RuntimeError, ValueError)  # what psutil raises in some containers


class CountersMissingError(Exception):
    """This platform does not provide I/O counters of processes."""


class IoCounters:
    """Counts I/O between calls of `take`; with `node`, also the I/O of the node's devices."""

    def __init__(self, node: bool = False):
        """
        Raises:
            CountersMissingError: This platform has no counters.
        """
        self._process = psutil.Process()
        self._node = node
        self._counting: Amounts = Counter()
        self._last = self._totals()

    def take(self) -> Amounts:
        """Return the amounts since the last call, none of them negative."""
        # A child that exits between the two readings is missing from both; the next reading includes it.
        totals = Counter({name: max(total, self._last[name]) for name, total in self._totals().items()})
        amounts = Counter({name: total - self._last[name] for name, total in totals.items()})
        self._last = totals
        return amounts

    def _totals(self) -> Amounts:
        try:
            before, totals = _read(Path("/proc/thread-self/io")), _read(Path("/proc/self/io"))
        except OSError as error:
            raise CountersMissingError from error
        for child in self._process.children(recursive=True):
            try:
                totals.update(_read(Path(f"/proc/{child.pid}/io")))
            except OSError:  # exited, or another user's
                continue
        totals.subtract(self._counting)
        if self._node:
            totals.update({f"node_{name}": amount for name, amount in _of_node().items()})
        self._counting.update(_read(Path("/proc/thread-self/io")))
        self._counting.subtract(before)
        return totals


def _read(path: Path) -> Amounts:
    """Read the counters from lines such as `rchar: 2012`."""
    pairs = (line.split(": ") for line in path.read_text(encoding="ascii").splitlines())
    return Counter({_PROC_NAMES[name]: int(value) for name, value in pairs if name in _PROC_NAMES})


def _of_node() -> Amounts:
    """Return the totals of this node's disks and network interfaces, over all processes."""
    totals: Amounts = Counter()
    with suppress(*_UNREADABLE):
        totals.update(_of_disks())
    with suppress(*_UNREADABLE):
        totals.update(_of_network())
    return totals


def _of_disks() -> Amounts:
    totals: Amounts = Counter()
    # Without device mappings, which would count twice.
    real = {path.parent.name for path in Path("/sys/block").glob("*/device")}
    for disk, disk_counts in (psutil.disk_io_counters(perdisk=True) or {}).items():
        if disk in real:
            totals["disk_read_bytes"] += disk_counts.read_bytes
            totals["disk_reads"] += disk_counts.read_count
            totals["disk_written_bytes"] += disk_counts.write_bytes
            totals["disk_writes"] += disk_counts.write_count
    return totals


def _of_network() -> Amounts:
    totals: Amounts = Counter()
    for interface, network_counts in (psutil.net_io_counters(pernic=True) or {}).items():
        if interface != "lo":
            totals["network_received_bytes"] += network_counts.bytes_recv
            totals["network_sent_bytes"] += network_counts.bytes_sent
    return totals


MISSING = "no I/O records: this platform does not count the I/O of a process (Linux does, in /proc/PID/io)"


class IoSampler:
    """Counts this worker's I/O from its creation on; local rank 0 also counts the node's devices."""

    def __init__(self, every_seconds: float, world: World):
        self.notes: tuple[str, ...] = ()
        self._rank, self._every, self._since = world.rank, every_seconds, time.monotonic()
        self._counters: IoCounters | None = None
        if every_seconds:
            try:
                self._counters = IoCounters(node=world.rank_info.local_rank == 0)
            except CountersMissingError:
                self.notes = (MISSING,)

    @contextmanager
    def recording(self, run: Path) -> Iterator[None]:
        """Append records to the worker's file in a run folder, until the block ends."""
        if self._counters is None:
            yield
            return
        path, over = worker_file(run, self._rank), threading.Event()
        thread = threading.Thread(target=self._record, args=(self._counters, path, over), name="io", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _record(self, counters: IoCounters, path: Path, over: threading.Event) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(RecordWriter(path)) as writer:
                while not over.wait(self._every):
                    writer.write(self._sample(counters))
                writer.write(self._sample(counters))
        except (OSError, CountersMissingError) as error:  # a full disk must not stop training
            logging.getLogger("lockstep").warning("I/O recording stopped: %r", error)

    def _sample(self, counters: IoCounters) -> dict[str, Any]:
        amounts, now = counters.take(), time.monotonic()
        seconds, self._since = now - self._since, now
        times = {"unix_time": time.time(), "seconds": round(seconds, 6)}
        return {"kind": KIND, "rank": self._rank, **times, **amounts}
