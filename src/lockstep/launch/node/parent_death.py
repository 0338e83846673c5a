"""Become a command that dies with its launcher: `python -I -S parent_death.py PID BIND COMMAND...`.

Linux sends the signal that prctl(PR_SET_PDEATHSIG) names when the thread that started a process ends, however it ended
(man 2 prctl); the setting outlives exec. Elsewhere the command runs untethered. The signal is SIGKILL for workers, for
nobody is left who would follow up a milder one. A worker is bound to its share of the cores here, too. A script of its
own, not a `preexec_fn`, because forking a threaded launcher allows no Python before exec; it costs 15 ms.
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


def command(words: Sequence[str], bind: str = "none") -> list[str]:
    """The words that run a command tethered to this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), bind, *words]


def main(launcher: int, bind: str, words: list[str]) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the signal was set
        return 1
    if bind != "none":
        place = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        runpy.run_path(str(Path(__file__).with_name("cpu_binding.py")))["bind_and_say"](bind, *place)
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and a command would inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"lockstep: cannot run {words[0]}: {error.strerror}", file=sys.stderr)
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
