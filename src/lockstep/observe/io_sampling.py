"""Counts a worker's I/O over time, in a thread that takes a sample every few seconds.

Workers do not wait for one another. The samples become records, which `lockstep.files.io_records` sums: of a run, the
worker writes its own; of an observed program, `lockstep.observe.job_steps` does where they arrive. A sample costs
1.5 ms of CPU time with 75 processes on the node (15 us per process to find the worker's children), and up to 1.3 ms
more for the node's devices: every 5 s, 0.03 to 0.06 % of one core.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from lockstep.files.io_records import append_record
from lockstep.files.io_totals import DISK_NAMES, NETWORK_NAMES, OF_NODE, PROC_NAMES, IoTotals

Amounts = Counter[str]
_UNREADABLE = (NotImplementedError, OSError, RuntimeError, ValueError)  # what psutil raises in some containers


class IoCounters:
    """Counts I/O between calls of `take`; with `node`, also the I/O of the node's devices."""

    def __init__(self, node: bool = False):
        """Raise OSError if this platform has no counters of processes."""
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
        before, totals = _read(Path("/proc/thread-self/io")), _read(Path("/proc/self/io"))
        for child in self._process.children(recursive=True):
            try:
                totals.update(_read(Path(f"/proc/{child.pid}/io")))
            except OSError:  # exited, or another user's
                continue
        totals.subtract(self._counting)
        if self._node:
            totals.update({f"{OF_NODE}{name}": amount for name, amount in _of_node().items()})
        self._counting.update(_read(Path("/proc/thread-self/io")))
        self._counting.subtract(before)
        return totals


def _read(path: Path) -> Amounts:
    """Read the counters from lines such as `rchar: 2012`."""
    pairs = (line.split(": ") for line in path.read_text(encoding="ascii").splitlines())
    return Counter({PROC_NAMES[name]: int(value) for name, value in pairs if name in PROC_NAMES})


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
    for disk, counts in (psutil.disk_io_counters(perdisk=True) or {}).items():
        if disk in real:
            amounts = (counts.read_bytes, counts.read_count, counts.write_bytes, counts.write_count)
            totals.update(dict(zip(DISK_NAMES, amounts, strict=True)))
    return totals


def _of_network() -> Amounts:
    totals: Amounts = Counter()
    for interface, counts in (psutil.net_io_counters(pernic=True) or {}).items():
        if interface != "lo":
            totals.update(dict(zip(NETWORK_NAMES, (counts.bytes_recv, counts.bytes_sent), strict=True)))
    return totals


MISSING = "no I/O records: this platform does not count the I/O of a process (Linux does, in /proc/PID/io)"


class IoSampler:
    """Counts this worker's I/O from its creation on; `counts_node`: and that of the node's devices, if it is the first.

    Args:
        every_seconds: Time between two samples; 0: counts nothing.
        use: Called with the totals so far, in one thread at a time.
    """

    def __init__(self, every_seconds: float, counts_node: bool, use: Callable[[IoTotals], object] = lambda _: None):
        self.notes: tuple[str, ...] = ()
        self._every, self._use, self._since = every_seconds, use, time.monotonic()
        self._totals = IoTotals()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._counters: IoCounters | None = None
        if every_seconds:
            try:
                self._counters = IoCounters(counts_node)
            except OSError:
                self.notes = (MISSING,)

    @contextmanager
    def recording(self, run: Path, rank: int) -> Iterator[None]:
        """Append records to the worker's file in a run folder, until the block ends."""
        written = IoTotals()

        def write(totals: IoTotals) -> None:
            nonlocal written
            append_record(run, totals.record(rank, written))
            written = totals

        self._use = write
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """Take samples in a thread from now on, until `stop`. Further calls change nothing."""
        if self._counters and not self._thread:
            self._over.clear()
            # Its stack does not count as the program's progress, because of its name.
            self._thread = threading.Thread(target=self._sample_often, name="lockstep-io", daemon=True)
            self._thread.start()

    def _sample_often(self) -> None:
        while self._counters and not self._over.wait(self._every):
            self.sample()

    def sample(self) -> None:
        """Take a sample, unless an earlier one could not be used."""
        with self._lock:
            if self._counters is None:
                return
            try:
                amounts, now = self._counters.take(), time.monotonic()
                self._totals = self._totals.plus(time.time(), now - self._since, amounts)
                self._since = now
                self._use(self._totals)
            except OSError as error:  # a full disk must not stop training
                self._counters = None
                logging.getLogger("lockstep").warning("I/O recording stopped: %r", error)

    def restart(self) -> None:
        """Begin the totals at 0 again; what came after the last sample belongs to the new ones."""
        with self._lock:
            self._totals = IoTotals()

    def stop(self) -> None:
        """End the thread, and take a last sample."""
        if self._thread and self._thread.is_alive():  # else this is a forked child
            self._over.set()
            self._thread.join()
            self.sample()
        self._thread = None
