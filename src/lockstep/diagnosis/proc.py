"""Facts about processes from /proc, without their cooperation (Linux, man 5 proc)."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
AFTER_NAME = 3  # the number of the first field after the command's name, which may contain spaces
CPU_TIMES = (14, 15, 16, 17)  # in user and system mode, and those of exited children


@dataclass(frozen=True)
class Facts:
    """A process.

    Args:
        state: R running, S waiting, D waiting in the kernel, T stopped, t stopped by a debugger, Z exited; "" if gone.
        tracer: The process that debugs it, or 0.
        caught: Whether its main thread handles a given signal.
    """

    state: str
    tracer: int = 0
    caught: bool = False


def facts(pid: int, signal_number: int) -> Facts:
    """Return facts about a process, and whether it handles a signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return Facts("")
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    handled = int(fields.get("SigCgt", "0"), 16) & ~int(fields.get("SigBlk", "0"), 16)
    caught = handled >> (signal_number - 1) & 1
    return Facts(fields.get("State", "")[:1], int(fields.get("TracerPid", "0")), bool(caught))


@dataclass(frozen=True)
class Activity:
    """What a process and its descendants have used so far: CPU seconds, and bytes read and written.

    The bytes are those of storage, and those of system calls of the main threads: the latter include file systems
    outside the page cache (GPFS, BeeGFS, FUSE), and other threads poll /proc and sockets all the time.
    """

    cpu_s: float
    bytes: int


def activity(pid: int, descendants: bool = True) -> Activity:
    """Return the activity of a process and, if asked for, of its living descendants."""
    pids = [pid]
    if descendants:
        with suppress(psutil.Error):
            pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    cpu_s, total = 0.0, 0
    for each in pids:
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            times = CPU_TIMES if descendants else CPU_TIMES[:2]
            cpu_s += sum(int(fields[time - AFTER_NAME]) for time in times) / TICKS_PER_SECOND
        with suppress(OSError, ValueError, KeyError):
            storage, calls = _io(f"/proc/{each}/io"), _io(f"/proc/{each}/task/{each}/io")
            total += storage["read_bytes"] + storage["write_bytes"] + calls["rchar"] + calls["wchar"]
    return Activity(cpu_s, total)


def _io(path: str) -> dict[str, int]:
    lines = Path(path).read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}
