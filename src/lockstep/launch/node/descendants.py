"""A process's descendants: adopting those whose parent has ended, and ending all of them.

Linux hands an orphan to its nearest living ancestor that has asked for it (prctl(PR_SET_CHILD_SUBREAPER), man 2 prctl),
so that even a daemon stays in the family. Elsewhere only those are found whose parents live.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MANY_FILES = 1 << 16


def adopt_orphans() -> bool:
    """Have every descendant that loses its parent become this process's child; whether the system does so."""
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0)


def end_with_parent(parent: int, number: signal.Signals) -> bool:
    """Have this signal sent to this process when its parent, or the thread there that started it, ends.

    Returns:
        Whether the parent still lives.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def kill_descendants(seconds: float = 5.0, but: Collection[int] = ()) -> list[int]:
    """Kill every descendant except these pids, also those that are born meanwhile; return the pids that do not go.

    A process in an uninterruptible wait, such as for a dead network file system, ends only when the kernel lets it.
    """
    deadline = time.monotonic() + seconds
    while True:
        children = [child for child in psutil.Process().children(recursive=True) if child.pid not in but]
        for child in children:
            _bury(child.pid)
        living = [child for child in children if _lives(child)]
        if not living or time.monotonic() > deadline:
            return [child.pid for child in living]
        for child in living:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.01)


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may: a large job has several for each worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _bury(pid: int) -> None:
    """Reap a process that has ended, if it is a child of this one."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
