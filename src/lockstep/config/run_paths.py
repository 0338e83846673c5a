"""Run folders: their names, the checkpoints in them, and the command that resumes a run. Without torch, which is slow.

A run folder is runs/DATASET-ARCH-TIME unless the user names another.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from lockstep.config.schema import TrainConfig

RUNS = Path("runs")


def new_run_path(config: TrainConfig) -> Path:
    """Return an unused path for a new run: runs/DATASET-ARCH-TIME."""
    stem = RUNS / f"{slug(config)}{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def runs_of(config: TrainConfig) -> list[Path]:
    """Return the run folders in runs/ that are named after this data set and architecture."""
    name = re.compile(re.escape(slug(config)) + r"\d{8}-\d{6}(-\d+)?")
    return [path for path in RUNS.glob("*") if name.fullmatch(path.name)]


def slug(config: TrainConfig) -> str:
    """Return DATASET-ARCH- in letters, digits, "_", "." and "-", with the last part of a path or MODULE:NAME."""
    names = (re.split(r"[:/]", name.rstrip("/"))[-1] for name in (config.data.source, config.model.arch))
    return "".join(re.sub(r"[^\w.-]", "_", name) + "-" for name in names)


MANIFEST_FILE = "manifest.json"  # written last
PREFIX = "step-"


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was taken, parsed from its folder name."""
    return int(path.name.removeprefix(PREFIX))


def all_in(folder: Path) -> list[Path]:
    """Return all checkpoints, oldest first, including those without a manifest."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return [path for path in all_in(folder) if (path / MANIFEST_FILE).exists()]


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    return next((path for path in reversed(all_in(folder)) if (path / MANIFEST_FILE).exists()), None)


COMMAND = "LOCKSTEP_COMMAND"  # set by Lockstep's launcher: its own command line
BEGINNING = ("--resume", "-r", "--run-dir", "--log-dir", "--start-epoch")


def typed_command(words: Sequence[str] = ()) -> str:
    """Return this process's command line, or that of other words, such as "lockstep train digits -np 2"."""
    program, *rest = words or sys.argv
    name = Path(program).name
    return shlex.join([*(["python", "-m", "lockstep"] if name == "__main__.py" else [name]), *rest])


def is_training(command: Sequence[str]) -> bool:
    """Return whether a command runs `lockstep train`, directly or with `python -m`."""
    return runs_subcommand(command, "train")


def runs_subcommand(command: Sequence[str], name: str) -> bool:
    return ("lockstep", name) in pairwise(_module(argument) for argument in command)


def how_to_resume(run: Path, is_launched: bool) -> str:
    """Return how to resume a run, with the full command line if this process has it.

    Args:
        is_launched: Whether a launcher started this process. Only Lockstep's launcher passes on its command line.
    """
    if not is_training(sys.argv):
        return f"to resume, call fit() with run_dir={str(run)!r}, resume='auto'"
    which = f"--run-dir {shlex.quote(str(run))} --resume auto"
    typed = os.environ.get(COMMAND, "") if is_launched else typed_command()
    return f"to resume: {without_beginning(typed)} {which}" if typed else f"to resume: the same command with {which}"


def without_beginning(typed: str) -> str:
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
