"""Whether a command's workers may be forked from a process that has Python and torch loaded, and what that has to load.

They may where the command is a Python program, and where nothing that it or its environment says would have made its
own interpreter start differently. docs/explanation/starting.md has the rules.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PRELOAD = "LOCKSTEP_PRELOAD"  # 0: every worker imports for itself
PRELOADED = ("torch", "torchvision", "torch._dynamo")
PRELOADED_FOR_LOCKSTEP = (*PRELOADED, "lockstep.cli.before_fork")
OURS = ("lockstep", "lockstep.study.step_worker")  # the modules by which `python -m` starts workers that train
FLAGS = ("-u", "-B", "-O", "-OO")
FLAG_WITH_VALUE = "-W"
# What Python reads when it starts and what the process that workers are forked from, which has the same variables, has
# read as they would have. With others, such as PYTHONINSPECT and PYTHONPROFILEIMPORTTIME, workers start by themselves.
PYTHON_VARIABLES = frozenset(
    f"PYTHON{name}"
    for name in (
        *("PATH", "HOME", "USERBASE", "NOUSERSITE", "SAFEPATH", "PLATLIBDIR", "PYCACHEPREFIX", "DONTWRITEBYTECODE"),
        *("UNBUFFERED", "IOENCODING", "UTF8", "COERCECLOCALE", "HASHSEED", "WARNINGS", "OPTIMIZE", "MALLOC"),
        *("FAULTHANDLER", "BREAKPOINT", "STARTUP", "INTMAXSTRDIGITS", "NODEBUGRANGES"),
    )
)
# OpenMP binds the thread that loads it, and its children with that.
PLACES = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
SCRIPT = re.compile(  # pip and uv write the first where the interpreter's path is long
    r"#!/bin/sh\s*\n'''exec' [\"']?(?P<through>[^\"'\s]+)[\"']? \"\$0\" \"\$@\"|#!(?P<direct>\S+)[ \t]*(?:\n|$)"
)


class NotForkedError(Exception):
    """Workers of this command start by themselves; the message says why."""


@dataclass(frozen=True)
class PythonCommand:
    """A Python program: the interpreter with its flags, the words after them, and the modules to load beforehand."""

    interpreter: str
    flags: tuple[str, ...]
    words: tuple[str, ...]
    modules: tuple[str, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Its `sys.argv`, which begins with a module's name where that is not found yet."""
        match self.words:
            case "-c", _, *arguments:
                return ("-c", *arguments)
            case "-m", *arguments:
                return (*arguments,)
        return self.words

    def starts_like(self, other: PythonCommand) -> bool:
        """Whether one preloaded process can serve both."""
        return replace(self, words=other.words) == other


def python_command(command: Sequence[str], environment: Mapping[str, str]) -> PythonCommand:
    """The Python program that a command is.

    Args:
        environment: The workers'.

    Raises:
        NotForkedError: It is none, or none whose workers may be forked.
    """
    if sys.platform != "linux":
        raise NotForkedError("workers are forked on Linux alone")
    if environment.get(PRELOAD, "1").lower() in ("0", "false", "no", "off"):
        raise NotForkedError(f"{PRELOAD}={environment[PRELOAD]}")
    program = shutil.which(command[0], path=environment.get("PATH")) or ""
    interpreter, words = program, list(command[1:])
    if program and not _is_this_python(program):
        interpreter, words = _interpreter_of_script(program), [program, *words]
    if not interpreter or not _is_this_python(interpreter):
        raise NotForkedError(f"{command[0]} is not run by {sys.executable}")
    flags, words = _split_flags(words)
    for name in sorted(environment):
        if name.startswith("PYTHON") and environment[name] and name not in PYTHON_VARIABLES:
            raise NotForkedError(f"{name} is set")
        if name in PLACES and environment[name].lower() != "false":
            raise NotForkedError(f"{name} is set, which binds the process that loads OpenMP")
    is_module = words[0] == "-m" and words[1] in OURS
    is_ours = is_module or Path(words[0]) == Path(sys.executable).with_name("lockstep")
    modules = PRELOADED_FOR_LOCKSTEP if is_ours else PRELOADED
    return PythonCommand(interpreter, tuple(flags), tuple(words), modules)


def _is_this_python(program: str) -> bool:
    """Whether it is this interpreter, in this environment: all virtual environments may share one binary."""
    ours = sys.executable
    try:
        return os.path.samefile(program, ours) and os.path.samefile(os.path.dirname(program), os.path.dirname(ours))
    except OSError:
        return False


def _interpreter_of_script(program: str) -> str:
    """The interpreter that the first line of an installed script names; "" where there is none."""
    try:
        with open(program, encoding="utf-8") as file:
            found = SCRIPT.match(file.readline() + file.readline())
    except (OSError, UnicodeDecodeError):
        return ""
    return (found["direct"] or found["through"]) if found else ""


def _split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The interpreter's flags, and the program with its arguments.

    Raises:
        NotForkedError: A flag has an effect that a fork does not have, or there is no program.
    """
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position][:2] not in ("-m", "-c"):
        word = words[position]
        if word not in FLAGS and not word.startswith(FLAG_WITH_VALUE):
            raise NotForkedError(f"the interpreter's flag {word}" if word != "-" else "the program comes from stdin")
        position += 2 if word == FLAG_WITH_VALUE else 1
    program = list(words[position:])
    if program and program[0][:2] in ("-m", "-c") and len(program[0]) > 2:  # -mname is -m name
        program[0:1] = [program[0][:2], program[0][2:]]
    if not program or (program[0] in ("-m", "-c") and len(program) < 2):
        raise NotForkedError("there is no program")
    return list(words[:position]), program
