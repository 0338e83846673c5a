"""`lockstep jobs`: list the jobs that `lockstep submit` has submitted, follow one, or cancel some."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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
    cluster_here,
    remembered,
    states_of,
)
from lockstep.report.watch.run import duration

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
        jobs = _named(named)
        if command.follow:
            from lockstep.cli.submit import follow

            return follow(jobs[0])
        return _cancel(jobs)
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


def _named(ids: Sequence[str]) -> list[SubmittedJob]:
    """Return the jobs with these ids, which may be without PBS's server, each one of this cluster.

    Raises:
        ConfigError: A job is unknown, or of another cluster.
    """
    known, cluster, jobs = remembered(), cache(cluster_here), list[SubmittedJob]()
    for text in ids:
        found = [job for job in known if text in (job.id, job.id.partition(".")[0])]
        if not found:
            raise ConfigError(f"{text}: not submitted with `lockstep submit`; see `lockstep jobs --all`")
        here = [job for job in found if cluster(job.system) == job.cluster]
        if not here:
            check_here(found[-1])
        jobs.append((here or found)[-1])
    return jobs


def _cancel(jobs: Sequence[SubmittedJob]) -> int:
    """Cancel all jobs, also after one that cannot be cancelled, and return the exit code."""
    failed = []
    for job in jobs:
        try:
            ask(*SCHEDULERS[job.system].cancel, job.id)
            print(f"cancelled job {job.id}")
        except ConfigError as error:
            failed.append(f"job {job.id}: {error}")
    if failed:
        raise ConfigError("; ".join(failed))
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
    age = duration(time.time() - job.unix_time)
    return tuple(printable_name(cell) for cell in (job.id, job.name, word, age, log, run if os.path.isdir(run) else ""))
