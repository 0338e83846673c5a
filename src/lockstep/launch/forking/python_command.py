"""Decide whether a command's workers can be forked from a preloaded process, and which modules it preloads.

They can if the command is a Python program and none of its flags and variables would make a new interpreter start
differently. docs/explanation/starting.md has the rules.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import ConfigError

PRELOAD = "LOCKSTEP_PRELOAD"  # 0: every worker starts its own interpreter
PRELOADED = ("torch", "torchvision", "torch._dynamo", "lockstep.world.observer")
# What a script with such a text imports: 0.3, 0.2 and 0.8 s of CPU time of each worker.
USED_BY = {
    re.compile(rb"\blockstep\.connect\b|from lockstep import .*\bconnect\b"): "lockstep.run.connect",
    re.compile(rb"(?:import|from) (?:horovod|lockstep\.hvd)\b|from lockstep import .*\bhvd\b"): "lockstep.hvd",
    re.compile(rb"\btorch\.compile\b|\bmodel\.compile\(|from torch import .*\bcompile\b"): "lockstep.models.compiler",
}
SCRIPT_BYTES = 1 << 20  # of a script that are searched
PRELOADED_FOR_LOCKSTEP = (*PRELOADED, "lockstep.cli.before_fork")
FLAGS = ("-u", "-B", "-O", "-OO")
FLAG_WITH_VALUE = "-W"
# Variables that Python reads when it starts, and that the preloaded process has read with the workers' values. With
# others, such as PYTHONINSPECT and PYTHONPROFILEIMPORTTIME, each worker starts its own interpreter.
PYTHON_VARIABLES = frozenset(
    f"PYTHON{name}"
    for name in (
        *("PATH", "HOME", "USERBASE", "NOUSERSITE", "SAFEPATH", "PLATLIBDIR", "PYCACHEPREFIX", "DONTWRITEBYTECODE"),
        *("UNBUFFERED", "IOENCODING", "UTF8", "COERCECLOCALE", "HASHSEED", "WARNINGS", "OPTIMIZE", "MALLOC"),
        *("FAULTHANDLER", "BREAKPOINT", "STARTUP", "INTMAXSTRDIGITS", "NODEBUGRANGES"),
    )
)
# With these, OpenMP binds the thread that loads it, and thereby its children.
PLACES = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
SCRIPT = re.compile(  # pip and uv write the first form if the interpreter's path is long
    r"#!/bin/sh\s*\n'''exec' [\"']?(?P<through>[^\"'\s]+)[\"']? \"\$0\" \"\$@\"|#!(?P<direct>\S+)[ \t]*(?:\n|$)"
)


class NotForkedError(Exception):
    """The reason why this command's workers cannot be forked."""


@dataclass(frozen=True)
class PythonCommand:
    """A Python program: the interpreter, its flags, the program with its arguments, and the modules to preload."""

    interpreter: str
    flags: tuple[str, ...]
    program: tuple[str, ...]
    modules: tuple[str, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Its `sys.argv`, which starts with the module's name if its file is not known yet."""
        match self.program:
            case "-c", _, *arguments:
                return ("-c", *arguments)
            case "-m", *arguments:
                return (*arguments,)
        return self.program

    def starts_like(self, other: PythonCommand) -> bool:
        """Whether the same preloaded process can fork both."""
        return replace(self, program=other.program) == other


def python_command(command: Sequence[str], environment: Mapping[str, str], on: str = sys.platform) -> PythonCommand:
    """Parse a command as a Python program.

    Args:
        environment: The workers' environment.

    Raises:
        NotForkedError: It is not a Python program, or its workers cannot be forked.
    """
    if on != "linux":
        raise NotForkedError("workers are forked only on Linux")
    if environment.get(PRELOAD, "1").lower() in ("0", "false", "no", "off"):
        raise NotForkedError(f"{PRELOAD}={environment[PRELOAD]}")
    executable = shutil.which(command[0], path=environment.get("PATH")) or ""
    interpreter, arguments = executable, list(command[1:])
    if executable and not _is_this_python(executable):
        interpreter, arguments = _interpreter_of_script(executable), [executable, *arguments]
    if not interpreter or not _is_this_python(interpreter):
        raise NotForkedError(f"{command[0]} is not run by {sys.executable}")
    flags, program = _split_flags(arguments)
    for name in sorted(environment):
        if name.startswith("PYTHON") and environment[name] and name not in PYTHON_VARIABLES:
            raise NotForkedError(f"{name} is set")
        if name in PLACES and environment[name].lower() != "false":
            raise NotForkedError(f"{name} is set, which binds the process that loads OpenMP")
    is_module = program[0] == "-m" and program[1] == "lockstep"
    is_ours = is_module or Path(program[0]) == Path(sys.executable).with_name("lockstep")
    modules = PRELOADED_FOR_LOCKSTEP if is_ours else (*PRELOADED, *_used_by(program))
    return PythonCommand(interpreter, tuple(flags), tuple(program), modules)


def check_program(command: Sequence[str]) -> None:
    """Check that this machine has a command and, for Python, its script.

    Raises:
        ConfigError: It has not, or the script cannot be read.
    """
    if not shutil.which(command[0]):
        raise ConfigError(f"{command[0]}: command not found; to run a script, put `python` before it")
    with suppress(NotForkedError):
        script = _split_flags(command[1:])[1][0]
        is_script = re.fullmatch(r"python[\d.]*t?", Path(command[0]).name) and script not in ("-m", "-c")
        if is_script and not os.access(script, os.R_OK):
            problem = "no permission to read it" if os.path.exists(script) else f"no such file in {os.getcwd()}"
            raise ConfigError(f"{script}: {problem}; give the path of a script that this user may read")


def _used_by(program: Sequence[str]) -> list[str]:
    """Return the modules of Lockstep that import what a program uses, as far as its script tells."""
    text = os.fsencode(program[1]) if program[0] == "-c" else b""
    if program[0] != "-c" and os.path.isfile(program[0]):  # not a pipe, whose text the worker reads
        with suppress(OSError), open(program[0], "rb") as file:
            text = file.read(SCRIPT_BYTES)
    return [module for pattern, module in USED_BY.items() if pattern.search(text)]


def _is_this_python(program: str) -> bool:
    """Whether a program is this interpreter in this virtual environment; several environments may share a binary."""
    ours = sys.executable
    try:
        return os.path.samefile(program, ours) and os.path.samefile(os.path.dirname(program), os.path.dirname(ours))
    except OSError:
        return False


def _interpreter_of_script(program: str) -> str:
    """Return the interpreter in the first line of an installed script, or ""."""
    try:
        with open(program, encoding="utf-8") as file:
            found = SCRIPT.match(file.readline() + file.readline())
    except (OSError, UnicodeDecodeError):
        return ""
    return (found["direct"] or found["through"]) if found else ""


def _split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split Python's arguments into the interpreter's flags and the program with its arguments.

    Raises:
        NotForkedError: A flag has an effect that a fork cannot have, or there is no program.
    """
    end = 0
    while end < len(arguments) and arguments[end].startswith("-") and arguments[end][:2] not in ("-m", "-c"):
        flag = arguments[end]
        if flag not in FLAGS and not flag.startswith(FLAG_WITH_VALUE):
            raise NotForkedError(f"the interpreter's flag {flag}" if flag != "-" else "the program comes from stdin")
        end += 2 if flag == FLAG_WITH_VALUE else 1
    program = list(arguments[end:])
    if program and program[0][:2] in ("-m", "-c") and len(program[0]) > 2:  # -mname is -m name
        program[0:1] = [program[0][:2], program[0][2:]]
    if not program or (program[0] in ("-m", "-c") and len(program) < 2):
        raise NotForkedError("there is no program")
    if program[0].endswith(".pyc"):
        raise NotForkedError("the program is compiled")
    return list(arguments[:end]), program
