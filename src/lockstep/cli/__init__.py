"""The command line, with one module per subcommand, imported when it is called.

`lockstep --help` imports none of them, so it is fast on a login node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module

from lockstep import __version__
from lockstep.errors import INTERRUPTED, ConfigError, LockstepError, reached_limit
from lockstep.files.output import guarded, keep_going, say, with_output

COMMANDS = {
    "train": "train a model on a data set or a folder of images",
    "run": "run any command as the workers of a job, on one or several hosts",
    "eval": "evaluate a checkpoint",
    "predict": "classify images",
    "export": "export a trained model for other programs",
    "models": "list the models",
    "datasets": "list the data sets",
    "data": "download, pack, verify and prepare data sets",
    "check": "check that the workers of a script train one model",
    "study": "measure scaling, batch sizes and data loading",
    "watch": "show the progress of a run live in the terminal",
    "stacks": "show what every worker of a running job is doing",
    "explain": "say what bounds a job's steps, and what would shorten them",
    "report": "write a report on runs and studies: figures, tables and a page",
    "compare": "say whether one job is faster than another one, and why",
    "script": "write a batch script for Slurm, PBS, LSF or Flux",
    "submit": "submit a job to Slurm, PBS or Flux",
    "sites": "list what computing centers document for their machines",
    "doctor": "check this machine or a job's hosts, and show how to fix problems",
}
HELP = ("-h", "--help", "--help-all")
USAGE_ERROR = 2
# What they print is not what they are for; jobs are similar.
WRITERS = ("check", "data", "explain", "export", "report", "study")
NEEDED = ("torch", "torchvision", "vl_convert")  # the commands that do not use them work without them
# Inserted before the arguments by `python -m torch.distributed.launch -m lockstep ...`; LOCAL_RANK has the same value.
INJECTED = ("--local-rank=", "--local_rank=")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0].startswith(INJECTED):
        del arguments[0]
    prepare_streams()
    return with_output(lambda: _run(arguments), " ".join(["lockstep", *arguments[:1]]))


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in (*HELP, "help"):
        print(_help())
        return 0 if arguments else USAGE_ERROR
    if arguments[0] == "--version":
        print(f"lockstep {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        hint = nearest(arguments[0], COMMANDS, "lockstep ") or "`lockstep --help` lists the commands"
        kind = "flag" if arguments[0].startswith("-") else "command"
        say(f"lockstep: error: {arguments[0]}: unknown {kind}; {hint}")
        return USAGE_ERROR
    try:
        os.getcwd()
    except FileNotFoundError:
        say(f"lockstep {arguments[0]}: error: the current folder was removed; change to another one")
        return 1
    if arguments[0] in WRITERS:
        keep_going()
    try:
        code: int = import_module(f"lockstep.cli.{arguments[0]}").main(arguments[1:])
        return code
    except LockstepError as error:
        say(f"lockstep {arguments[0]}: error: {error}")
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        say(f"lockstep {arguments[0]}: error: {error.name} is not installed")
        return 1
    except OSError as error:
        if not (limit := reached_limit(error)):
            raise
        say(f"lockstep {arguments[0]}: error: {limit}")
        return 1
    except KeyboardInterrupt:  # in a command without signal handlers, or before a job sets them
        say("\nlockstep: interrupted")
        return INTERRUPTED


def action_of(
    arguments: Sequence[str], command: str, noun: str, title: str, about: str, actions: Mapping[str, str]
) -> str | None:
    """Return the action that the first argument names, or print the command's help page and return None.

    Args:
        noun: What the command calls its actions; `title` is the plural.
        actions: Their descriptions by name.

    Raises:
        ConfigError: The first argument is not an action.
    """
    if not arguments or arguments[0] in HELP:
        from lockstep.cli.help import page

        more = f"`lockstep {command} {noun.upper()} --help` shows the flags of one of them."
        print(page(f"lockstep {command} {noun.upper()} [arguments]", about, {title: actions}, more))
        return None
    if arguments[0] not in actions:
        hint = nearest(arguments[0], actions, f"lockstep {command} ") or f"must be one of {', '.join(actions)}"
        raise ConfigError(f"{arguments[0]}: unknown {noun}; {hint}")
    return arguments[0]


def nearest(name: str, known: Iterable[str], command: str) -> str:
    """Return "did you mean `COMMAND NAME`?" for the most similar known name, or "" if none is similar."""
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean `{command}{near[0]}`?" if near else ""


def prepare_streams() -> None:
    """Open /dev/null for closed streams (`>&-`), and print "?" for characters that the terminal cannot encode.

    What cannot be written is dropped on stderr, and ends the command on stdout until `keep_going`.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # Reuses the closed stream's descriptor, so that no other file gets it.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, descriptor <= 2)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False))
    sys.stdout, sys.stderr = guarded(sys.stdout, drops=False), guarded(sys.stderr, drops=True)


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {about}" for name, about in COMMANDS.items())
    return (
        f"Lockstep {__version__}: synchronous data-parallel training for PyTorch\n\n"
        f"usage: lockstep COMMAND [arguments]\n\n{rows}\n\n"
        f"`lockstep COMMAND --help` shows the flags of a command.\n"
        f"Try it: lockstep train -np 2"
    )
