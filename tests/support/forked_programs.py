"""Run Python programs in processes forked from one that has imported torch, instead of new interpreters.

Each is set up like a fresh interpreter (`lockstep.launch.forking.forked_worker`). Python programs that it starts by
`subprocess` are forked too, unless it has imported torch itself. Tests of starting processes, or of imports, must not
use this module.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import multiprocessing.process
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import lockstep
from lockstep.launch.forking import forked_worker
from lockstep.launch.forking.deferred_modules import DeferredFinder, third_party
from lockstep.launch.forking.forked_worker import Loaded
from lockstep.launch.forking.late_environment import DEBUG_LEVEL, THREADS, without_effect
from lockstep.launch.forking.python_command import PRELOAD, NotForkedError, PythonCommand, python_command
from lockstep.launch.node import parent_death
from lockstep.launch.node.processes import end_with_parent

LAUNCHERS = ("horovodrun", "lockstep", "torchrun")
TORCHRUN = (("torch", "distributed", "run.py"), ("torch", "distributed", "launch.py"))
OURS = Path(lockstep.__file__).parent
UNBUFFERED = "PYTHONUNBUFFERED"
OWN_FLAGS = (["-P", "-m"], ["-P", "-c"])  # of Lockstep's programs: the current folder has none of its modules
_old_streams: list[Any] = []  # kept so that they are not flushed here: their contents belong to the parent


def program_of(command: Sequence[str], environment: Mapping[str, str], own: Mapping[str, str]) -> PythonCommand:
    """Parse the command of an interpreter without flags other than -u.

    PRELOAD counts only for the launcher's own forks.

    Raises:
        NotForkedError: It is not a program for this interpreter.
    """
    is_own = list(command[1:3]) in OWN_FLAGS and command[3].removeprefix("from ").startswith("lockstep.")
    program = python_command([command[0], *command[2:]] if is_own else command, {**environment, PRELOAD: "1"})
    if set(program.flags) - {"-u"}:
        raise NotForkedError("it has flags")
    read_by_torch = (DEBUG_LEVEL, *without_effect(own, environment))
    for name in {*environment, *own}:
        is_read_at_start = name.startswith("PYTHON") or name in read_by_torch
        is_applied = name in (*THREADS, UNBUFFERED, "PYTHONPATH")
        if is_read_at_start and not is_applied and environment.get(name) != own.get(name):
            raise NotForkedError(f"{name} differs")
    return program


def give_descriptors(streams: Sequence[int], keep: Sequence[int] = ()) -> None:
    """Install the standard streams, keep `keep`, and close all other descriptors."""
    unused = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, unused + number)
    for number in range(len(streams)):
        os.dup2(unused + number, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with suppress(OSError):  # the descriptor that listed the folder
                os.close(int(name))


def open_streams(program: PythonCommand, environment: Mapping[str, str]) -> None:
    """Reopen the standard streams, because Python caches what kind of file a stream is."""
    unbuffered = "-u" in program.flags or bool(environment.get(UNBUFFERED))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old, mode = getattr(sys, name), "w" if number else "r"
        _old_streams.append(old)
        binary = open(number, f"{mode}b", buffering=0 if unbuffered and number else -1, closefd=False)  # noqa: SIM115
        through = unbuffered and number > 0
        new = io.TextIOWrapper(binary, old.encoding, old.errors, line_buffering=number == 2, write_through=through)
        vars(sys).update({name: new, f"__{name}__": new})


class _Start(NamedTuple):
    """The arguments of `subprocess`'s function that starts a process, in order."""

    arguments: Sequence[str | bytes | os.PathLike[str]]
    executables: Sequence[bytes]
    close_fds: bool
    keep: Sequence[int]
    folder: str | None
    variables: Sequence[bytes] | None
    input_end: int
    input_other: int
    output_other: int
    output_end: int
    errors_other: int
    errors_end: int
    failure_other: int
    failure_end: int
    restore_signals: bool
    new_session: bool
    process_group: int | None
    group: int | None
    groups: Sequence[int] | None
    user: int | None
    umask: int
    before: Callable[[], Any] | None

    def environment(self) -> dict[str, str]:
        if self.variables is None:
            return dict(os.environ)
        pairs = (os.fsdecode(each).partition("=") for each in self.variables)
        return {name: value for name, _, value in pairs}

    def command(self) -> list[str]:
        command = [os.fsdecode(each) for each in self.arguments]
        return [os.fsdecode(self.executables[0]), *command[1:]] if len(self.executables) == 1 else command

    def check(self, in_launcher: bool) -> None:
        """Raise NotForkedError if a forked process cannot replace this start."""
        if "torch" in sys.modules and not in_launcher:
            raise NotForkedError("this process may have used torch")
        if any(Path(entry, "lockstep").is_dir() for entry in python_path(self.environment(), os.getcwd())):
            raise NotForkedError("it may have another Lockstep, and each would hold modules back")
        asked = (self.before, self.group, self.groups, self.user)
        if asked != (None,) * 4 or self.umask >= 0 or not Path(self.folder or ".").is_dir():
            raise NotForkedError("it asks for more than this does")


def _is_launcher() -> bool:
    """Return whether this process is a launcher, whose children do not depend on the state of torch's threads."""
    program = Path(sys.argv[0])
    return program.name in LAUNCHERS or OURS in program.parents or program.parts[-3:] in TORCHRUN


def fork_python_programs(loaded: Loaded, own: Mapping[str, str]) -> None:
    """Patch `subprocess` to fork this process instead of executing this Python."""
    execute: Callable[..., int] = vars(subprocess)["_fork_exec"]

    def fork_or_execute(*arguments: Any) -> int:
        start = _Start(*arguments[: len(_Start._fields)])
        try:
            command, parent = _untethered(start.command())
            start.check(_is_launcher() or parent > 0)
            program = program_of(command, start.environment(), own)
        except NotForkedError:
            return execute(*arguments)
        pid = os.fork()
        if pid == 0:
            if parent and not end_with_parent(parent, signal.SIGKILL):
                os._exit(1)
            _run_child(start, program, loaded, own)
        return pid

    load = forked_worker.load
    vars(subprocess)["_fork_exec"] = fork_or_execute
    # More of Lockstep is imported here than in a new interpreter; restore the held-back modules that it needs.
    vars(forked_worker)["load"] = lambda modules: load([*modules, "lockstep"])


def _untethered(command: list[str]) -> tuple[list[str], int]:
    """Return the command that `lockstep.launch.node.parent_death` executes and the process that it exits with, or 0."""
    if [*command[1:4], *command[5:6]] == ["-I", "-S", parent_death.__file__, "none"]:
        return command[6:], int(command[4])
    return command, 0


def _run_child(start: _Start, program: PythonCommand, loaded: Loaded, own: Mapping[str, str]) -> NoReturn:
    """Run the requested program, and exit."""
    code = 1
    try:
        environment, folder = start.environment(), os.path.abspath(start.folder or os.getcwd())
        if start.new_session:
            os.setsid()
        if start.process_group is not None and start.process_group >= 0:
            os.setpgid(0, start.process_group)
        asked = (start.input_end, start.output_end, start.errors_end)
        streams = [number if end < 0 else end for number, end in enumerate(asked)]
        keep = [each for each in start.keep if each != start.failure_end]
        if not start.close_fds:
            keep += [int(name) for name in os.listdir("/proc/self/fd") if _is_inherited(int(name))]
        give_descriptors(streams, keep)
        open_streams(program, environment)
        _forget_the_parent(loaded)
        Path("/proc/self/comm").write_text(Path(sys.executable).name)  # torch's launcher renames itself
        os.environ.clear()
        os.environ.update(own)  # variables that libraries have read already
        _set_threads(loaded.third_party["torch"], int(own["OMP_NUM_THREADS"]))
        sys.orig_argv = [sys.executable, "-c"]
        code = run(program.program, environment, folder, loaded)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _set_threads(torch: ModuleType, threads: int) -> None:
    """Set the number of torch's threads in this process, and in those that it forks.

    The call makes a pool of threads, which no fork copies. The next call makes it again, but autograd's threads would
    do so all at once, and abort.
    """
    torch.set_num_threads(threads)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def _is_inherited(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


def _forget_the_parent(loaded: Loaded) -> None:
    """Remove the parent's exit handlers, signal handlers, and modules imported from its folder."""
    for name in third_party(sys.modules):
        file = getattr(sys.modules[name], "__file__", None)
        if name not in loaded.third_party and file and "site-packages" not in file:
            del sys.modules[name]
    gc.freeze()  # the parent's file objects must not be closed here, where their descriptors belong to other files
    atexit._clear()
    vars(weakref.finalize)["_registry"].clear()
    atexit.register(multiprocessing.util._exit_function)
    atexit.register(logging.shutdown)
    vars(multiprocessing.process)["_children"].clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook = sys.__excepthook__
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, DeferredFinder)]


def python_path(environment: Mapping[str, str], folder: str) -> list[str]:
    """Return the folders of PYTHONPATH."""
    entries = environment.get("PYTHONPATH", "")
    return [os.path.join(folder, entry) for entry in entries.split(os.pathsep)] if entries else []


def run(words: Sequence[str], environment: Mapping[str, str], folder: str, loaded: Loaded) -> int:
    """Run a program and end as an interpreter does; return its exit code."""
    code = 0
    path = [*python_path(environment, folder), *loaded.path]
    try:
        forked_worker.run(words, environment, folder, replace(loaded, path=path))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    return code & 0xFF
