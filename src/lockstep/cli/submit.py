"""`lockstep submit`: write a batch script, submit it, and show its output.

The facts are from sbatch(1), qsub(1B), qstat(1B), flux-batch(1) and flux-jobs(1).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli.parse import parse
from lockstep.cli.script import split_at_dashes
from lockstep.config.flags import Positional, arg
from lockstep.errors import ConfigError
from lockstep.launch.plan.batch_script import BatchJob, render
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.site_profiles import find_site
from lockstep.world.batch_job import answer_of

SCRIPTS = Path("lockstep-jobs")
# Variables that sbatch prefers to the script's lines, by the typed flag. Under "", lines that each job needs.
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
    """Show the job's output with tail -F until Ctrl-C; the job continues."""


def main(arguments: Sequence[str]) -> int:
    flags, command = split_at_dashes(arguments)
    wanted = parse(SubmitCommand, "submit", flags)
    site = find_site(wanted.site, os.environ, names_of_this_machine())
    text = render(wanted.system, wanted.job, command, site)
    for flag in ("", *flags):
        for name in PREFERRED.get(flag.partition("=")[0].replace("_", "-"), "").split():
            os.environ.pop(f"SBATCH_{name}", None)
    script = _write(wanted.job.name, text)
    job = submit(wanted.system, wanted.job.name, script, wanted.dependency)
    print(f"submitted job {job.id} ({wanted.job.name}): {script}")
    print(f"state: {job.show}; output: tail -F {shlex.quote(str(job.log))}; to cancel it: {job.cancel}", flush=True)
    if wanted.follow:
        with suppress(KeyboardInterrupt):
            subprocess.run(["tail", "-n", "+1", "-F", job.log], check=False)
    return 0


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


ANSWER_SECONDS = 60.0  # a busy scheduler is slow
CHECK = "check the queue for the job before you try again"


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job's id, its output file, and the commands that show its state and cancel it."""

    id: str
    log: Path
    show: str
    cancel: str


@dataclass(frozen=True)
class Scheduler:
    """The programs of a batch system.

    Args:
        submit: Its arguments come before the script's name.
        depend: Its arguments for a dependency such as afterok:17.
        log: The name of a job's output file, from its {name} and {id}, or the {number} before its first dot.
        id: A pattern of its ids.
        show, cancel: The commands for users.
    """

    submit: tuple[str, ...]
    depend: str
    log: str
    id: str
    show: str
    cancel: str


SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Scheduler(
        submit=("sbatch", "--parsable"),
        depend="--kill-on-invalid-dep=yes --dependency={}",
        log="{name}-{id}.out",
        id=r"\d+",
        show="squeue --jobs={id}",
        cancel="scancel {id}",
    ),
    "pbs": Scheduler(
        submit=("qsub", "-C", "#PBS"),  # with another prefix in PBS_DPREFIX, the script would have no options
        depend="-W depend={}",
        log="{name}.o{number}",
        id=r"\d+\S*",
        show="qstat {id}",
        cancel="qdel {id}",
    ),
    "flux": Scheduler(
        submit=("flux", "batch"),
        depend="--dependency={}",
        log="{name}-{id}.out",
        id=r"\S+",
        show="flux jobs {id}",
        cancel="flux cancel {id}",
    ),
}


def submit(system: str, name: str, script: Path, dependency: str | None) -> SubmittedJob:
    """Submit a script in the current folder.

    Raises:
        ConfigError: The scheduler is not installed, refuses it, does not answer, or does not print an id.
    """
    scheduler = SCHEDULERS[system]
    program = scheduler.submit[0]
    depend = [word.format(dependency) for word in scheduler.depend.split()] if dependency else []
    try:
        code, printed, complaint = answer_of(*scheduler.submit, *depend, str(script), seconds=ANSWER_SECONDS)
    except FileNotFoundError:
        raise ConfigError(f"{program} is not installed here; run this on a login node of the cluster") from None
    except OSError as error:
        raise ConfigError(f"{program}: {error.strerror}; {CHECK}") from None
    if code:
        raise ConfigError(f"{program} failed: {complaint or f'exit code {code}'}")
    job, _, cluster = (printed.split() or [""])[-1].partition(";")  # sbatch names a cluster that is not this one
    if not re.fullmatch(scheduler.id, job):
        raise ConfigError(f"{program} printed {' '.join(printed.split())!r} instead of a job's id; {CHECK}")
    where = f" --clusters={cluster}" if cluster else ""
    show, cancel = (text.format(id=shlex.quote(job)) + where for text in (scheduler.show, scheduler.cancel))
    return SubmittedJob(job, Path(scheduler.log.format(name=name, id=job, number=job.split(".")[0])), show, cancel)
