"""`python -m lockstep.launch.node`: a host's node process, under its guard.

The guard is the node process's parent: if the node process is killed, it ends the job's remaining processes on its
host. Linux reparents orphans to the nearest living ancestor that has requested this, so the guard adopts the workers'
descendants. It forks the node process at its start, and only forwards signals to it until that process exits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config.values import NOTICE
from lockstep.launch.node.job_folders import make_scratch, remove_abandoned, remove_scratch
from lockstep.launch.node.node_process import serve
from lockstep.launch.node.processes import adopt_orphans, end_with_parent, kill_descendants

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *NOTICE)


def main() -> int:
    """Run the node process in a child, which gets SIGHUP if this process is killed; clean up after it."""
    remove_abandoned()
    scratch = make_scratch()
    adopt_orphans()
    guard = os.getpid()
    pid = os.fork()
    if not pid:
        return _run_node(scratch, guard)
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
    return code if code >= 0 else 128 - code


def _run_node(scratch: Path, guard: int) -> int:
    try:
        return asyncio.run(serve(scratch)) if end_with_parent(guard, signal.SIGHUP) else 1
    finally:
        if os.getppid() != guard:  # it was killed and cannot remove the folders
            remove_scratch(scratch)


if __name__ == "__main__":
    sys.exit(main())
