"""Submit batch scripts to Slurm, PBS and Flux.

The facts are from sbatch(1), qsub(1B), qstat(1B), flux-batch(1) and flux-jobs(1).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.world.batch_job import answer_of

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
