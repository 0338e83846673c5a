"""The parent of a node process: if the node process is killed, it ends the job's remaining processes on its host.

Linux reparents orphans to the nearest living ancestor that has requested this, so this process adopts the workers'
descendants. It forks the node process at its start, and only forwards signals to it until that process exits.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config.time_limit import NOTICE
from lockstep.launch.node.processes import (
    adopt_orphans,
    end_with_parent,
    kill_descendants,
    remove_dead_sockets,
    socket_folders,
)
from lockstep.launch.node.scratch_folder import make_scratch, remove_abandoned, remove_scratch

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *NOTICE)


def guarded(work: Callable[[Path], int]) -> int:
    """Run `work` in a child process, and clean up after it.

    Args:
        work: Called with a folder that is removed afterwards; returns the exit code. Its process gets SIGHUP if this
            process is killed.
    """
    remove_abandoned()
    earlier, scratch = socket_folders(), make_scratch()
    adopt_orphans()
    guard = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            return work(scratch) if end_with_parent(guard, signal.SIGHUP) else 1
        finally:
            if os.getppid() != guard:  # it was killed and cannot remove the folder
                shutil.rmtree(scratch, ignore_errors=True)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # an open copy would hide the end of the launcher or the node process
        os.dup2(nothing, number)

    def forward(number: int, frame: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for each in FORWARDED:
        signal.signal(each, forward)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    kill_descendants()
    remove_scratch(scratch)
    remove_dead_sockets(earlier)
    return code if code >= 0 else 128 - code
