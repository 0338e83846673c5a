"""Become a command that dies with its launcher: `python -I -S parent_death.py PID BIND COMMAND...`.

Linux sends the signal set with prctl(PR_SET_PDEATHSIG) when the thread that started a process ends, for any reason
(man 2 prctl); the setting survives exec. On other systems the command runs without it. Workers get SIGKILL, because no
process would be left to follow up a milder signal. This script also binds a worker to its share of the cores. It is a
script and not a `preexec_fn`, because no Python may run between fork and exec in a threaded launcher; it costs 15 ms.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127  # the shell's exit code for a command that cannot be run


def command(arguments: Sequence[str], bind: str = "none") -> list[str]:
    """Return a command that runs `arguments` and dies with this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), bind, *arguments]


def main(launcher: int, bind: str, arguments: list[str]) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it exited before the signal was set
        return 1
    if bind != "none":
        runpy.run_path(str(Path(__file__).with_name("hardware.py")))["bind_worker"](bind, os.environ)
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the command would inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(arguments[0], arguments)
    except OSError as error:
        print(f"lockstep: cannot run {arguments[0]}: {error.strerror}", file=sys.stderr)
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
