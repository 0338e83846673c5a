"""Build the command line that resumes a run, for messages."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

COMMAND = "LOCKSTEP_COMMAND"  # set by Lockstep's launcher: its own command line
BEGINNING = ("--resume", "-r", "--run-dir", "--log-dir", "--start-epoch")


def typed_command(arguments: Sequence[str] | None = None) -> str:
    """Return this process's command line, such as "lockstep train digits -np 2"."""
    program, *rest = sys.argv if arguments is None else arguments
    name = Path(program).name
    return shlex.join([*(["python", "-m", "lockstep"] if name == "__main__.py" else [name]), *rest])


def is_training(command: Sequence[str]) -> bool:
    """Return whether a command runs `lockstep train`, directly or with `python -m`."""
    return ("lockstep", "train") in pairwise(_module(argument) for argument in command)


def how_to_resume(
    run: Path,
    is_launched: bool,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Return how to resume a run, with the full command line if this process knows it.

    Args:
        is_launched: Whether a launcher started this process. Only Lockstep's launcher passes on its command line.
        arguments: This process's command line; default `sys.argv`.
    """
    arguments = sys.argv if arguments is None else arguments
    if not is_training(arguments):
        return f"to resume, call fit() with run_dir={str(run)!r}, resume='auto'"
    which = f"--run-dir {shlex.quote(str(run))} --resume auto"
    typed = environment.get(COMMAND, "") if is_launched else typed_command(arguments)
    return f"to resume: {_without_beginning(typed)} {which}" if typed else f"to resume: the same command with {which}"


def _without_beginning(typed: str) -> str:
    """Return a command line without the flags for the run folder and the starting point."""
    kept, drops_value = list[str](), False
    for argument in shlex.split(typed):
        is_value = drops_value and not argument.startswith("-")
        flag, has_value, _ = argument.partition("=")
        is_beginning = flag.replace("_", "-") in BEGINNING
        drops_value = is_beginning and not has_value
        kept += [argument] * (not is_value and not is_beginning)
    return shlex.join(kept)


def _module(argument: str) -> str:
    path = Path(argument)
    return path.parent.name if path.name == "__main__.py" else path.name
