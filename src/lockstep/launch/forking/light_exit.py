"""Let a forked worker exit without touching what was preloaded: each page that it writes to would be copied.

The interpreter clears all modules at its exit, and C libraries destroy their global objects. For torch, that takes 0.6
CPU seconds and 200 MB per worker, all at the same time. So the preloaded modules are left alone; the interpreter clears
only those that the script has imported, and the process ends before the global objects of the preloaded libraries are
destroyed. Exit handlers, destructors of the script's objects and those of libraries that it has loaded run as usual.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

CHECKED = "triton"  # the nanobind in its library reports its objects that are left at the exit
INSTRUMENTS = ("LD_PRELOAD", "LD_AUDIT")  # with these, libraries that end after torch's, such as Darshan, write results


def import_checked(load: Callable[[str], None]) -> list[Any]:
    """Import the package that must be cleared at the exit; return the objects that this created.

    Args:
        load: Imports a module.
    """
    before = set(map(id, gc.get_objects()))
    if importlib.util.find_spec(CHECKED) is not None:
        with suppress(Exception):  # torch's own import reports it, or goes without
            load(CHECKED)
    return [each for each in gc.get_objects() if id(each) not in before]


def end_before_the_libraries() -> None:
    """Let the process end when C's exit handlers come to those that exist now, which run in the opposite order."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and not any(map(os.environ.get, INSTRUMENTS)):
        libc.on_exit(libc._exit, None)  # with the exit code
        libc.on_exit(libc.fcloseall, None)  # which runs before it, and flushes C's streams


def release(modules: Mapping[str, ModuleType], checked: list[Any]) -> None:
    """Let the interpreter clear only what the script has made, and the objects of the checked package.

    Args:
        modules: All preloaded modules of third parties.
        checked: As `import_checked` returned them; emptied.
    """
    if gc.isenabled():
        gc.collect()  # without what was frozen
        gc.disable()
    for each in gc.get_objects():  # a preloaded module may refer to a file of the script that would stay unflushed
        if issubclass(type(each), io.IOBase):
            with suppress(Exception):
                each.flush()
    if isinstance(sys.__stdout__, io.TextIOWrapper):
        sys.__stdout__.reconfigure(
            line_buffering=True
        )  # destructors may print, and preloaded functions keep the stream
    api = ctypes.pythonapi
    for each in checked:
        if gc.is_tracked(each):  # take it from the frozen objects
            api.PyObject_GC_UnTrack(ctypes.py_object(each))
            api.PyObject_GC_Track(ctypes.py_object(each))
    checked.clear()
    left = {name: module for name, module in modules.items() if name.partition(".")[0] != CHECKED}
    for name, module in modules.items():
        if name not in left:
            sys.modules.setdefault(name, module)
        elif sys.modules.get(name) is module:
            del sys.modules[name]
    api.Py_IncRef(ctypes.py_object(left))  # for ever
