"""The command that continues a run, as its user would type it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

COMMAND = "LOCKSTEP_COMMAND"  # from our own launcher: what was typed there


def typed_command(arguments: Sequence[str] | None = None) -> str:
    """This process's command line, such as "lockstep train digits -np 2"."""
    program, *rest = sys.argv if arguments is None else arguments
    name = Path(program).name
    return shlex.join([*(["python", "-m", "lockstep"] if name == "__main__.py" else [name]), *rest])


def is_training(command: Sequence[str]) -> bool:
    """Whether a command is `lockstep train`, started in whatever way."""
    return ("lockstep", "train") in pairwise(_module(word) for word in command)


def how_to_resume(
    run: Path,
    is_launched: bool,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """What to do to go on with a run, as completely as it is known in this process.

    Args:
        is_launched: A launcher has started this process; what was typed is known if that was ours.
        arguments: This process's; None: `sys.argv`.
    """
    arguments = sys.argv if arguments is None else arguments
    if not is_training(arguments):
        return f"to go on, call fit() with resume={str(run)!r}"
    typed = environment.get(COMMAND, "") if is_launched else typed_command(arguments)
    if not typed:
        return f"to go on, start the same command with --resume {shlex.quote(str(run))}"
    return f"to go on: {_without_resume(typed)} --resume {shlex.quote(str(run))}"


def _without_resume(typed: str) -> str:
    words = [word for word in shlex.split(typed) if not word.startswith("--resume=")]
    pairs = zip(["", *words], words, strict=False)
    return shlex.join(word for before, word in pairs if "--resume" not in (before, word))


def _module(word: str) -> str:
    path = Path(word)
    return path.parent.name if path.name == "__main__.py" else path.name
