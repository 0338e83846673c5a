"""Counters of I/O bytes and operations: of this process with its children, and of the node's devices.

Process counters come from Linux's /proc/PID/io (proc(5)): bytes requested by read and write calls, and bytes that
reached storage. The kernel adds a child's counters to its parent's on wait(), so the I/O of finished loader processes
is included. Finding the children reads two files per process on the node; these reads are counted separately, for the
counting thread, and subtracted.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

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
LUSTRE = Path("/proc/fs/lustre/llite")
_LUSTRE_NAMES = {"read_bytes": ("reads", "read_bytes"), "write_bytes": ("writes", "written_bytes")}


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
            totals.update({f"node_{name}": amount for name, amount in of_node().items()})
        self._counting.update(_read(Path("/proc/thread-self/io")))
        self._counting.subtract(before)
        return totals


def _read(path: Path) -> Amounts:
    """Read the counters from lines such as `rchar: 2012`."""
    pairs = (line.split(": ") for line in path.read_text(encoding="ascii").splitlines())
    return Counter({_PROC_NAMES[name]: int(value) for name, value in pairs if name in _PROC_NAMES})


def of_node(lustre: Path = LUSTRE) -> Amounts:
    """Return the totals of this node's disks, network interfaces and Lustre mounts, over all processes."""
    totals: Amounts = Counter()
    with suppress(*_UNREADABLE):
        totals.update(_of_disks())
    with suppress(*_UNREADABLE):
        totals.update(_of_network())
    for stats in lustre.glob("*/stats"):
        totals.update(_of_lustre(stats))
    return totals


def _of_disks() -> Amounts:
    totals: Amounts = Counter()
    real = {
        path.parent.name for path in Path("/sys/block").glob("*/device")
    }  # no device mappings, which would count twice
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


def _of_lustre(stats: Path) -> Amounts:
    """Return a mount's totals, from lines such as `read_bytes  12 samples [bytes] 4096 1048576 6295552`."""
    totals: Amounts = Counter()
    try:
        lines = stats.read_text(encoding="utf-8").splitlines()
    except OSError:  # readable only by root at some sites
        return totals
    for columns in map(str.split, lines):
        if columns and columns[0] in _LUSTRE_NAMES and len(columns) >= 7:
            operations, size = _LUSTRE_NAMES[columns[0]]
            totals[f"lustre_{operations}"] += int(columns[1])
            totals[f"lustre_{size}"] += int(columns[6])
    return totals
