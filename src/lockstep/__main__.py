"""`python -m lockstep`, the form in which workers are started, and that torchrun's `-m` needs."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading

from lockstep.cli import main  # and nothing slow, as Ctrl-C would be a traceback here


def _is_worker() -> bool:
    from lockstep.errors import WorldError
    from lockstep.world.launcher_environment import RankInfo

    try:
        return RankInfo.from_environment().launcher != "none"
    except WorldError:
        return False


def _end(code: int) -> None:
    """End as the interpreter does, but leave torch's objects to the system: taking them apart takes it 2 s.

    What is left out: `__del__` of objects that still live, and the atexit functions of C libraries.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # ends idle executors, which a plain join would wait for
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    code = main()
    if _is_worker() and sys.getprofile() is None and sys.gettrace() is None:
        _end(code)
    raise SystemExit(code)
