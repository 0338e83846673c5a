"""A process's descendants: adopt orphans, and end all descendants.

Linux reparents an orphan to its nearest living ancestor that has called prctl(PR_SET_CHILD_SUBREAPER) (man 2 prctl), so
that even a daemon stays a descendant. On other systems, only processes whose parents live are found.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MANY_FILES = 1 << 16
KILL_SECONDS = 5.0


def adopt_orphans() -> None:
    """Let this process adopt descendants whose parent exits."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, number: signal.Signals) -> bool:
    """Set PR_SET_PDEATHSIG: this process gets a signal when its parent, or the thread that started it, ends.

    Returns:
        Whether the parent still lives.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def kill_descendants(but: Collection[int] = ()) -> list[int]:
    """Kill every descendant except these pids, including new ones; return the pids that cannot be killed.

    A process in an uninterruptible wait, such as for a dead network file system, exits only when that wait ends.
    """
    return _kill(lambda: [child for child in psutil.Process().children(recursive=True) if child.pid not in but])


def kill_orphans(variables: Mapping[str, str], but: Collection[int]) -> list[int]:
    """Kill the children, except these pids, that were started with these variables, and their descendants.

    Return the pids that cannot be killed, as `kill_descendants` does.
    """

    def find() -> list[psutil.Process]:
        children = [child for child in psutil.Process().children() if child.pid not in but]
        return [each for child in children if _has(child, variables) for each in _with_descendants(child)]

    return _kill(find)


def _kill(find: Callable[[], list[psutil.Process]]) -> list[int]:
    """Kill the processes that `find` returns until there are none or the time is over; return the remaining pids."""
    deadline = time.monotonic() + KILL_SECONDS
    found = set[psutil.Process]()
    while True:
        found.update(find())
        for process in found:
            _reap(process.pid)
        found = {process for process in found if process.is_running()}
        living = [process for process in found if _lives(process)]
        if not living or time.monotonic() > deadline:
            return [process.pid for process in living]
        for process in living:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


def allow_many_files() -> None:
    """Raise this process's limit for open files to the maximum: a large job needs several per worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _has(process: psutil.Process, variables: Mapping[str, str]) -> bool:
    """Whether a process was started with these variables; False if that is unknown."""
    try:
        return bool(variables.items() <= process.environ().items())
    except psutil.Error:
        return False


def _with_descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _reap(pid: int) -> None:
    """Reap a process that has exited, if it is a child of this one."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
