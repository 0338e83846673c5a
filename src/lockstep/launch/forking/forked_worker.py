"""Make a process that was forked from a preloaded one behave like a fresh interpreter that runs the user's command.

`load` imports modules in the preloaded process; `run`, in its child, restores the state of a new interpreter and
executes the command. Both run below the preloaded process's `-c` command. Exceptions of the script pass through it, so
that the interpreter sets the exit code and finalizes as usual. The sequence follows CPython's Modules/main.c.

At a worker's exit, what was preloaded is not touched, because each page that is written to would be copied.
The interpreter clears all modules at its exit, and C libraries destroy their global objects. For torch, that takes 0.6
CPU seconds and 200 MB per worker, all at the same time. So the preloaded modules are left alone; the interpreter clears
only those that the script has imported, and the process ends before the global objects of the preloaded libraries are
destroyed. Exit handlers, destructors of the script's objects and those of libraries that it has loaded run as usual.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib
import io
import linecache
import mmap
import multiprocessing.process
import os
import pkgutil
import runpy
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import BuiltinImporter, PathFinder, SourceFileLoader
from itertools import takewhile
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from lockstep.diagnosis import publisher
from lockstep.imports import collector_paused
from lockstep.launch.forking.deferred_modules import defer, third_party
from lockstep.launch.forking.late_environment import THREADS, apply_to_numpy, apply_to_torch
from lockstep.world import autoload

CONSTANT_SEED = 67280421310721  # of torch's default generator, in versions that do not draw a random one
CHECKED = "triton"  # the nanobind in its library reports its objects that are left at the exit
INSTRUMENTS = ("LD_PRELOAD", "LD_AUDIT")  # with these, libraries that end after torch's, such as Darshan, write results
# Numbers of fields of /proc/PID/stat (man 5 proc); 3 is the first after the command's name, which may contain spaces.
CODE, STACK, DATA, HEAP = (26, 27), 28, (45, 46), 47
FIRST_AFTER_NAME = 3
PR_SET_MM, PR_SET_MM_MAP = 35, 14
_shown: list[mmap.mmap] = []  # keeps the memory that the kernel reads
WITH_CACHED = sys.version_info < (3, 15)  # whether `__main__` has `__cached__`


@dataclass
class Loaded:
    """The modules that `load` imported, and the interpreter's state before."""

    packages: list[str]
    third_party: dict[str, ModuleType] = field(default_factory=dict)
    checked: list[Any] = field(default_factory=list)
    """Objects of the checked package, which must be cleared at the exit."""
    standard: set[str] = field(default_factory=set)
    """Top-level modules of the standard library that a fresh interpreter does not import."""
    path: list[str] = field(default_factory=lambda: list(sys.path))
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))
    added_filters: dict[str, list[Any]] = field(default_factory=dict)
    """By the top-level package whose import added them."""


def load(modules: Sequence[str]) -> Loaded:
    """Import modules for `run`, without collecting garbage.

    Raises:
        ImportError: The first module cannot be imported. The others are optional.
    """
    first, *others = modules
    loaded = Loaded([name.partition(".")[0] for name in modules])
    atexit.register(_release, loaded)  # before the imports, thus called after their exit handlers
    at_start = set(takewhile(lambda name: name.partition(".")[0] != "lockstep", sys.modules))
    with collector_paused():
        if "torch" in loaded.packages and importlib.util.find_spec("numpy") is not None:
            _import("numpy", loaded)  # before torch, so that its warnings filters are known
        if "torch" in loaded.packages:
            loaded.checked = _import_checked(loaded)
        _import(first, loaded)
        for name in others:
            try:
                _import(name, loaded)
            except Exception:  # the script's own import reports it
                continue
        new = [name for name in sys.modules if name not in at_start]
        outside = third_party(new)
        loaded.third_party = {name: sys.modules[name] for name in outside}
        loaded.standard = {name.partition(".")[0] for name in set(new).difference(outside)}
        gc.freeze()
    _end_before_the_libraries()
    return loaded


def _import_checked(loaded: Loaded) -> list[Any]:
    """Import the package that must be cleared at the exit; return the objects that this created."""
    before = set(map(id, gc.get_objects()))
    if importlib.util.find_spec(CHECKED) is not None:
        with suppress(Exception):  # torch's own import reports it, or goes without
            _import(CHECKED, loaded)
    return [each for each in gc.get_objects() if id(each) not in before]


def _end_before_the_libraries() -> None:
    """Let the process end when C's exit handlers come to those that exist now, which run in the opposite order."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and not any(map(os.environ.get, INSTRUMENTS)):
        libc.on_exit(libc._exit, None)  # with the exit code
        libc.on_exit(libc.fcloseall, None)  # which runs before it, and flushes C's streams


def _release(loaded: Loaded) -> None:
    """Let the interpreter clear only what the script has made, and the objects of the checked package."""
    modules, loaded.third_party = loaded.third_party, {}
    if gc.isenabled():
        gc.collect()  # without what was frozen
        gc.disable()
    for each in gc.get_objects():  # a preloaded module may refer to a file of the script that would stay unflushed
        if issubclass(type(each), io.IOBase):
            with suppress(Exception):
                each.flush()
    if isinstance(sys.__stdout__, io.TextIOWrapper):
        # Destructors may print, and preloaded functions keep the stream.
        sys.__stdout__.reconfigure(line_buffering=True)
    api = ctypes.pythonapi
    for each in loaded.checked:
        if gc.is_tracked(each):  # take it from the frozen objects
            api.PyObject_GC_UnTrack(ctypes.py_object(each))
            api.PyObject_GC_Track(ctypes.py_object(each))
    loaded.checked.clear()
    left = {name: module for name, module in modules.items() if name.partition(".")[0] != CHECKED}
    for name, module in modules.items():
        if name not in left:
            sys.modules.setdefault(name, module)
        elif sys.modules.get(name) is module:
            del sys.modules[name]
    api.Py_IncRef(ctypes.py_object(left))  # for ever


def _import(name: str, loaded: Loaded) -> None:
    before = list(warnings.filters)
    importlib.import_module(name)
    added = [item for item in warnings.filters if item not in before]
    loaded.added_filters.setdefault(name.partition(".")[0], []).extend(added)


class _Map(ctypes.Structure):
    """The kernel's struct prctl_mm_map."""

    _fields_ = (
        *((f"{part}_{end}", ctypes.c_uint64) for part in ("code", "data") for end in ("start", "end")),
        *((name, ctypes.c_uint64) for name in ("heap_start", "heap_end", "stack_start")),
        *((f"{part}_{end}", ctypes.c_uint64) for part in ("arguments", "variables") for end in ("start", "end")),
        ("auxiliary", ctypes.c_uint64),
        ("auxiliary_size", ctypes.c_uint32),
        ("executable", ctypes.c_uint32),
    )


def show_as(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Show these as this process's command and environment in `ps`, `pkill -f` and psutil, if the kernel supports that.

    The kernel reads /proc/PID/cmdline and environ from the process's memory, and the process can set their addresses
    (man 2 prctl, PR_SET_MM_MAP; the kernel needs CONFIG_CHECKPOINT_RESTORE).
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, ValueError, IndexError):  # the name is not worth a process
        arguments = b"".join(os.fsencode(argument) + b"\0" for argument in command)
        variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # the kernel shows no other kind of memory
        memory = mmap.mmap(-1, len(arguments) + len(variables), flags=private)
        memory.write(arguments + variables)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        middle, end = start + len(arguments), start + len(arguments) + len(variables)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        libc = ctypes.CDLL(None)
        libc.sbrk.restype = ctypes.c_void_p
        new_map = _Map(
            *(int(fields[number - FIRST_AFTER_NAME]) for number in (*CODE, *DATA, HEAP)),
            *(libc.sbrk(0), int(fields[STACK - FIRST_AFTER_NAME]), start, middle, middle, end),
            *(0, 0, 0xFFFFFFFF),  # keep the auxiliary vector and the executable
        )
        libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(new_map), ctypes.sizeof(new_map), 0)
        _shown[:] = [memory]


def run(command: Sequence[str], environment: Mapping[str, str], folder: str, loaded: Loaded) -> None:
    """Run a command, given without the interpreter and its flags, in this forked process as in a fresh interpreter.

    Return, or raise the exception with which the interpreter exits after the command.
    """
    flags = sys.orig_argv[: sys.orig_argv.index("-c")]
    sys.orig_argv = [*flags, *command]
    show_as(sys.orig_argv, environment)
    threads = {name: os.environ[name] for name in THREADS if name in os.environ}  # as the libraries read them
    _restore_environment(environment, folder)
    _restore_interpreter(loaded)
    main = _new_main()
    start = {**os.environ, **threads}
    all_with = set(loaded.packages) - {"numpy"}  # scripts often set variables between numpy's import and torch's
    defer(loaded.third_party, all_with, partial(_after_import, loaded, start))
    publisher.start(answers=False)  # so that a hang before the import of torch has a stack
    temporary: list[str] = []
    try:
        _execute(command, main, loaded, temporary)
    except SystemExit:
        raise
    except BaseException as error:
        _hide_own_frames(error, partial(_delete, main, temporary))
        raise
    _delete(main, temporary)


def _delete(main: ModuleType, names: Sequence[str]) -> None:
    for name in names:
        vars(main).pop(name, None)


def _restore_environment(environment: Mapping[str, str], folder: str) -> None:
    coerced = os.environ.get("LC_CTYPE")  # Python sets it in the C locale (PEP 538)
    os.environ.clear()
    os.environ.update(environment)
    if coerced is not None and "LC_ALL" not in environment:
        os.environ.setdefault("LC_CTYPE", coerced)
    if hasattr(time, "tzset"):
        time.tzset()
    os.chdir(folder)


def _restore_interpreter(loaded: Loaded) -> None:
    gc.enable()
    sys.path[:] = loaded.path
    importlib.invalidate_caches()
    linecache.clearcache()
    _set_filters(loaded.filters)
    tempfile.tempdir = None
    multiprocessing.process.current_process().authkey = os.urandom(32)
    vars(multiprocessing.process)["ORIGINAL_DIR"] = os.getcwd()  # of spawned processes
    _restore_streams()


def _restore_streams() -> None:
    """Set line buffering as a fresh interpreter does for the current descriptors."""
    for stream, descriptor in ((sys.stdin, 0), (sys.stdout, 1), (sys.stderr, 2)):
        if isinstance(stream, io.TextIOWrapper):
            by_line = descriptor == 2 or os.isatty(descriptor)
            stream.reconfigure(line_buffering=by_line and not stream.write_through)  # -u writes through


def _set_filters(filters: Sequence[Any]) -> None:
    """Replace the warnings filters through a public function, which also resets the warnings already shown."""
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]


def _new_main() -> ModuleType:
    """Return a new `__main__` with the attributes that it has before any command runs."""
    main = ModuleType("__main__")
    vars(main).update(__loader__=BuiltinImporter, __builtins__=builtins)
    if "__annotations__" in vars(sys.modules["__main__"]):
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's name for the same module
        sys.modules["__mp_main__"] = main
    return main


def _execute(command: Sequence[str], main: ModuleType, loaded: Loaded, temporary: list[str]) -> None:
    """Execute the command; add to `temporary` the attributes of `__main__` that the interpreter deletes afterwards."""
    first = command[0]
    if first in ("-c", "-m"):
        sys.argv = [first, *command[2:]]
        _insert_path("" if first == "-c" else os.getcwd(), loaded)
        if first == "-c":
            _execute_code(command[1], main)
        else:
            runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]  # as Modules/main.c does
        return
    sys.argv = list(command)
    path = os.getcwd() if first == "." else os.path.join(os.getcwd(), first)
    if pkgutil.get_importer(path) is not None:  # a folder or a zip file
        sys.path.insert(0, path)
        _drop_shadowed(path, loaded)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        _insert_path(str(Path(path).resolve().parent), loaded)
        _execute_file(path, main, temporary)


def _insert_path(entry: str, loaded: Loaded) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, entry)
        _drop_shadowed(entry or os.getcwd(), loaded)


def _drop_shadowed(folder: str, loaded: Loaded) -> None:
    """Let the script's modules take precedence over standard library modules that only the preloading imported."""
    try:
        names = {name.partition(".")[0] for name in os.listdir(folder)}
    except OSError:
        return
    for top in names & loaded.standard:
        spec = PathFinder.find_spec(top, [folder])
        if spec is not None and spec.has_location:
            for name in [name for name in sys.modules if name.partition(".")[0] == top]:
                del sys.modules[name]


def _execute_code(text: str, main: ModuleType) -> None:
    if sys.version_info >= (3, 14):
        text = textwrap.dedent(text)
    if sys.version_info >= (3, 13):  # tracebacks show the lines
        linecache.cache["<string>"] = (len(text), None, text.splitlines(keepends=True), "<string>")
    exec(compile(text, "<string>", "exec", dont_inherit=True), vars(main))


def _execute_file(path: str, main: ModuleType, temporary: list[str]) -> None:
    try:
        with io.open_code(path) as file:
            data = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    own: dict[str, Any] = {"__file__": path, "__cached__": None} if WITH_CACHED else {"__file__": path}
    vars(main).update(own, __loader__=SourceFileLoader("__main__", path))
    temporary += own
    exec(compile(data, path, "exec", dont_inherit=True), vars(main))


def _hide_own_frames(error: BaseException, after: Callable[[], None]) -> None:
    """Start the exception's traceback with the script's frames, and call `after` when it is printed.

    The hook replaces itself with the script's hook when it is called.
    """
    script = error.__traceback__
    while script is not None and script.tb_frame.f_code.co_filename == __file__:
        script = script.tb_next
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        return

    def show(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = hook
        sys.last_traceback = script
        hook(kind, value.with_traceback(script), script)
        after()

    sys.excepthook = show


def _after_import(loaded: Loaded, start: Mapping[str, str], packages: Collection[str]) -> None:
    """Repeat the effects that the import of these packages has in a fresh interpreter."""
    for name in loaded.added_filters:
        if name in packages:
            _set_filters([*loaded.added_filters[name], *warnings.filters])
    if "numpy" in packages:
        random = sys.modules.get("numpy.random")
        if random is not None:
            random.seed()
        apply_to_numpy(start, os.environ)
    if "torch" in packages:
        import torch

        autoload.attach()
        if torch.default_generator.initial_seed() != CONSTANT_SEED:
            torch.default_generator.seed()
        apply_to_torch(start, os.environ)
