"""`lockstep jobs`: list the jobs that `lockstep submit` has submitted, follow one, or cancel some."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lockstep.cli.parse import parse
from lockstep.config.flags import arg
from lockstep.errors import ConfigError
from lockstep.files.untrusted import printable_name
from lockstep.launch.submission import (
    ELSEWHERE,
    GONE,
    SCHEDULERS,
    JobState,
    SubmittedJob,
    ask,
    check_here,
    remembered,
    states_of,
)

HEADINGS: tuple[str, ...] = ("job", "name", "state", "age", "output", "run folder")
MOST = 20  # jobs that are shown without --all


@dataclass(frozen=True)
class JobsCommand:
    """List the jobs that were submitted from this folder with `lockstep submit`: state, age, run folder and output.

    Examples:
        lockstep jobs
        lockstep jobs --cancel 17
    """

    everywhere: Annotated[bool, arg(name="all")] = False
    """List the jobs of all folders, and all of them."""
    cancel: Annotated[tuple[str, ...], arg(metavar="ID")] = ()
    """Cancel these jobs."""
    follow: Annotated[str | None, arg(metavar="ID")] = None
    """Print a job's output until it ends, and exit with its exit code."""


def main(arguments: Sequence[str]) -> int:
    command = parse(JobsCommand, "jobs", arguments)
    named = (*command.cancel, *([command.follow] if command.follow else []))
    if command.cancel and command.follow:
        raise ConfigError("--cancel and --follow contradict each other; remove one of them")
    if named:
        known = {job.id: job for job in remembered()}  # of equal numbers, the last one; it is checked below
        if unknown := [job for job in named if job not in known]:
            raise ConfigError(f"{', '.join(unknown)}: not submitted with `lockstep submit`; see `lockstep jobs --all`")
        for job in named:
            check_here(known[job])
        if command.follow:
            from lockstep.cli.submit import follow

            return follow(known[command.follow])
        for job in command.cancel:
            ask(*SCHEDULERS[known[job].system].cancel, job)
            print(f"cancelled job {job}")
        return 0
    jobs = remembered() if command.everywhere else remembered(Path.cwd())[-MOST:]
    if not jobs:
        print("no job was submitted from this folder; `lockstep jobs --all` lists those of all folders")
        return 0
    states = states_of(jobs)
    rows = [HEADINGS, *(_row(job, states[job]) for job in reversed(jobs))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(job: SubmittedJob, state: JobState) -> tuple[str, ...]:
    word = state.word.lower() if len(state.word) > 1 else state.word
    if state.word == ELSEWHERE and job.cluster:
        word = f"on {job.cluster}"
    if state.code is not None:
        word += f", exit code {state.code}"
    elif state.reason not in ("", "None") and state.word != GONE:
        word += f" ({state.reason})"
    log, run = (os.path.relpath(path) if path else "" for path in (job.log, job.run))
    age = _age(time.time() - job.unix_time)
    return tuple(printable_name(cell) for cell in (job.id, job.name, word, age, log, run if os.path.isdir(run) else ""))


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
