"""Counters of bytes and operations: of this process with its children, and of the node's devices.

A process's counters are Linux's /proc/PID/io (proc(5)): what was asked for by read and write calls, and what came from
or went to storage. The kernel adds a child's counters to its parent's when it is waited for, so the I/O of loader
processes that have ended is not lost. Counting reads files, too: two for each process on the node, among which the
children are found. The thread that counts has counters of its own, by which this is taken out.
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
    """This platform does not count the I/O of processes, or does not show it."""


class IoCounters:
    """What was read and written since it was last asked; with `node`, also by the devices of the whole node."""

    def __init__(self, node: bool = False):
        """
        Raises:
            CountersMissingError: There are no counters here.
        """
        self._process = psutil.Process()
        self._node = node
        self._counting: Amounts = Counter()
        self._last = self._totals()

    def take(self) -> Amounts:
        """The amounts since the last call, none of them negative."""
        # A child that is waited for after its parent's counters were read is missing there; the next reading has it.
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
            except OSError:  # ended by now, or another user's
                continue
        totals.subtract(self._counting)
        if self._node:
            totals.update({f"node_{name}": amount for name, amount in of_node().items()})
        self._counting.update(_read(Path("/proc/thread-self/io")))
        self._counting.subtract(before)
        return totals


def _read(path: Path) -> Amounts:
    """The counters in a file of lines such as `rchar: 2012`."""
    pairs = (line.split(": ") for line in path.read_text(encoding="ascii").splitlines())
    return Counter({_PROC_NAMES[name]: int(value) for name, value in pairs if name in _PROC_NAMES})


def of_node(lustre: Path = LUSTRE) -> Amounts:
    """The totals of this node's disks, network interfaces and Lustre mounts, whoever uses them."""
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
    real = {path.parent.name for path in Path("/sys/block").glob("*/device")}  # not the mappings laid over them
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
    """One mount's totals, from lines such as `read_bytes  12 samples [bytes] 4096 1048576 6295552`."""
    totals: Amounts = Counter()
    try:
        lines = stats.read_text(encoding="utf-8").splitlines()
    except OSError:  # root's alone, as some sites have it
        return totals
    for words in map(str.split, lines):
        if words and words[0] in _LUSTRE_NAMES and len(words) >= 7:
            operations, size = _LUSTRE_NAMES[words[0]]
            totals[f"lustre_{operations}"] += int(words[1])
            totals[f"lustre_{size}"] += int(words[6])
    return totals
