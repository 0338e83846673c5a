"""`lockstep submit`: write a batch script, submit it, and follow its output."""

from __future__ import annotations

import os
import shlex
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli.parse import parse
from lockstep.cli.script import split_at_dashes
from lockstep.config.flags import Positional, arg
from lockstep.errors import ConfigError, LockstepError
from lockstep.files.output import say
from lockstep.launch.plan.batch_script import BatchJob, render
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.site_profiles import find_site
from lockstep.launch.submission import JobState, SubmittedJob, submit

SCRIPTS = Path("lockstep-jobs")
POLL_SECONDS = 5.0  # between questions to the scheduler, which serves all users
READ_SECONDS = 0.5
UNKNOWN_POLLS = 3  # in a row, until a job that the scheduler does not list counts as ended
LATE_SECONDS = 5.0  # after a job's end, for the end of its output to arrive by the file system
SILENT_SECONDS = 600.0  # without an answer from the scheduler
# Variables that sbatch prefers to the script's lines, by the typed flag; by "", those of lines that each job needs.
PREFERRED = {
    "": "ARRAY_INX ERROR JOB_NAME NO_REQUEUE OPEN_MODE OUTPUT SIGNAL WAIT",
    "--time": "TIMELIMIT",
    "--queue": "PARTITION",
    "--partition": "PARTITION",
    "--account": "ACCOUNT",
    "--gpus-per-node": "GPUS_PER_NODE GPUS",
}


@dataclass(frozen=True)
class SubmitCommand:
    """Write a batch script as `lockstep script` does, and submit it to Slurm, PBS or Flux.

    Examples:
        lockstep submit slurm --nodes 2 --gpus-per-node 4 -- python train.py
        lockstep submit pbs --follow -- lockstep train cifar10
    """

    system: Annotated[Positional[Literal["slurm", "pbs", "flux"]], arg(metavar="slurm|pbs|flux")]
    """Batch system."""
    job: BatchJob = field(default_factory=BatchJob)
    dependency: Annotated[str | None, arg(metavar="TYPE:ID")] = None
    """Start after another job, such as afterok:17."""
    site: Annotated[str | None, arg(metavar="NAME|FILE|none")] = None
    """Site profile. Default: the one that matches."""
    follow: bool = False
    """Print the job's output until it ends, and exit with its exit code."""
    dry_run: bool = False
    """Print the script and exit."""


def main(arguments: Sequence[str]) -> int:
    flags, command = split_at_dashes(arguments)
    wanted = parse(SubmitCommand, "submit", flags)
    site = find_site(wanted.site, os.environ, names_of_this_machine())
    text = render(wanted.system, wanted.job, command, site)
    if wanted.dry_run:
        print(text, end="")
        return 0
    for flag in ("", *flags):
        for name in PREFERRED.get(flag.partition("=")[0].replace("_", "-"), "").split():
            os.environ.pop(f"SBATCH_{name}", None)
    script = _write(wanted.job.name, text)
    job = submit(wanted.system, wanted.job.name, script, wanted.dependency)
    print(f"submitted job {job.id} ({wanted.job.name}): {script}")
    print(f"state: {job.show}; output: tail -F {shlex.quote(str(job.log))}; to cancel it: {job.cancel}", flush=True)
    return _follow(job) if wanted.follow else 0


def _write(name: str, text: str) -> Path:
    """Write the script into a new file of the folder of scripts."""
    try:
        SCRIPTS.mkdir(exist_ok=True)
        number = 1
        while True:
            try:
                with (SCRIPTS / f"{name}-{number}.sh").open("x", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(text)
                return SCRIPTS / f"{name}-{number}.sh"
            except FileExistsError:
                number += 1
    except OSError as error:
        raise ConfigError(f"{SCRIPTS}/ cannot be written: {error.strerror}; change to another folder") from None


def _follow(job: SubmittedJob) -> int:
    """Print a job's output until it ends, and return its exit code.

    Raises:
        LockstepError: Its exit code is unknown, because the scheduler no longer has the job, or does not answer.
    """
    output, answered, unknown = _FollowedFile(job.log), time.monotonic(), 0
    state: JobState | None = None
    try:
        while unknown < UNKNOWN_POLLS and not (state and job.has_ended(state)):
            output.print_for(POLL_SECONDS)
            try:
                state = job.state()
                answered, unknown = time.monotonic(), 0 if state else unknown + 1
            except ConfigError as error:
                if time.monotonic() - answered > SILENT_SECONDS:
                    raise LockstepError(f"job {job.id}: its exit code is unknown: {error}") from None
        output.print_for(LATE_SECONDS)
    except KeyboardInterrupt:
        say(f"\nlockstep: job {job.id} goes on; to end it: {job.cancel}")
        raise
    where = f"see {job.log}" if output.size else f"no output has arrived in {job.log}"
    if state is None or state.code is None:
        word = state.word if state else "ended"
        raise LockstepError(f"job {job.id}: {word}; its exit code is unknown, {where}")
    say(f"lockstep: job {job.id}: {state.word}, exit code {state.code}" + ("" if output.size else f"; {where}"))
    return state.code if state.code in range(256) else 1


class _FollowedFile:
    """Prints a file, which may not exist yet, as it grows; `size` is the number of bytes printed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.size = 0

    def print_for(self, seconds: float) -> None:
        """Print for some seconds. Opening the file again shows what another host has appended."""
        until = time.monotonic() + seconds
        while True:
            try:
                with self._path.open("rb") as file:
                    file.seek(self.size)
                    data = file.read()
            except OSError:
                data = b""
            self.size += len(data)
            sys.stdout.write(self._decoder.decode(data))
            sys.stdout.flush()
            if time.monotonic() >= until:
                return
            time.sleep(READ_SECONDS)
