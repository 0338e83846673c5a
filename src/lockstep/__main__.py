"""The entry point of `python -m lockstep`, with which the launcher and `torchrun -m` start workers."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading

from lockstep.cli import main  # nothing slow: Ctrl-C during an import prints a traceback


def _is_worker() -> bool:
    from lockstep.errors import WorldError
    from lockstep.world.launcher_environment import RankInfo

    try:
        return RankInfo.from_environment().launcher != "none"
    except WorldError:
        return False


def end(code: int) -> None:
    """Exit like the interpreter, but without destroying torch's objects, which takes 2 s.

    This skips `__del__` of live objects and the atexit functions of C libraries.
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
        end(code)
    raise SystemExit(code)
