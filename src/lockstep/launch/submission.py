"""Submit batch scripts to Slurm, PBS and Flux, and read a job's state.

| | submit | state and exit code | cancel |
|---|---|---|---|
| Slurm | `sbatch --parsable` | `scontrol show job` | `scancel` |
| PBS | `qsub` | `qstat -f`, with `-x` for ended jobs in PBS Professional | `qdel` |
| Flux | `flux batch` | `flux jobs -a` | `flux cancel` |

The facts are from sbatch(1), scontrol(1), qsub(1B), qstat(1B), flux-batch(1) and flux-jobs(1).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.world.batch_job import answer_of

ANSWER_SECONDS = 60.0  # a busy scheduler is slow
UNKNOWN_JOB = "invalid job id|unknown job ?id|jobid .*unknown|has finished"


@dataclass(frozen=True)
class JobState:
    """The scheduler's word for a job's state, such as PENDING or R, and the exit code of an ended job, if known."""

    word: str
    code: int | None = None


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job. `cluster` is the Slurm cluster that sbatch printed, which is not this one, or ""."""

    system: str
    id: str
    log: Path
    cluster: str = ""

    @property
    def show(self) -> str:
        """The command that shows the job's state."""
        return SCHEDULERS[self.system].show.format(id=shlex.quote(self.id)) + self._on_cluster

    @property
    def cancel(self) -> str:
        """The command that cancels the job."""
        return SCHEDULERS[self.system].cancel.format(id=shlex.quote(self.id)) + self._on_cluster

    @property
    def _on_cluster(self) -> str:
        return f" --clusters={self.cluster}" if self.cluster else ""

    def state(self) -> JobState | None:
        """Return the job's state, or None if its scheduler does not have it (any more).

        Raises:
            ConfigError: The scheduler does not answer.
        """
        return SCHEDULERS[self.system].state(self)

    def has_ended(self, state: JobState) -> bool:
        return state.word in SCHEDULERS[self.system].ended


@dataclass(frozen=True)
class Scheduler:
    """The programs of a batch system.

    Args:
        submit: Its arguments come before the script's name.
        depend: Its arguments for a dependency such as afterok:17.
        log: The name of a job's output file, from its {name} and {id}, or the {number} before its first dot.
        id: A pattern of its ids.
        show, cancel: The commands for users.
        ended: The words of jobs that have ended; with any other, a job may still run.
    """

    submit: tuple[str, ...]
    depend: tuple[str, ...]
    log: str
    id: str
    show: str
    cancel: str
    state: Callable[[SubmittedJob], JobState | None]
    ended: tuple[str, ...]


def submit(system: str, name: str, script: Path, dependency: str | None) -> SubmittedJob:
    """Submit a script in the current folder.

    Raises:
        ConfigError: The scheduler refuses it, or does not print an id.
    """
    scheduler = SCHEDULERS[system]
    words = [*scheduler.submit]
    if dependency:
        *before, flag = scheduler.depend
        words += [*before, f"{flag}={dependency}"]
    advice = "check the queue for the job before you try again"
    printed = _ask(*words, str(script), advice=advice)
    job, _, cluster = (printed.split() or [""])[-1].partition(";")  # sbatch names a cluster that is not this one
    if not re.fullmatch(scheduler.id, job):
        raise ConfigError(f"{words[0]} printed {' '.join(printed.split())!r} instead of a job's id; {advice}")
    return SubmittedJob(system, job, Path(scheduler.log.format(name=name, id=job, number=job.split(".")[0])), cluster)


def _ask(*words: str, advice: str = "try again", about_job: bool = False) -> str:
    """Return a scheduler command's output.

    Args:
        advice: What to do if it does not answer.
        about_job: Ignore the error that a job is unknown.

    Raises:
        ConfigError: The command is not installed, fails, or does not answer.
    """
    try:
        code, printed, complaint = answer_of(*words, seconds=ANSWER_SECONDS)
    except FileNotFoundError:
        raise ConfigError(f"{words[0]} is not installed here; run this on a login node of the cluster") from None
    except OSError as error:
        raise ConfigError(f"{words[0]}: {error.strerror}; {advice}") from None
    if code and not (about_job and re.search(UNKNOWN_JOB, complaint, re.IGNORECASE)):
        raise ConfigError(f"{words[0]} failed: {complaint or f'exit code {code}'}")
    return printed


def _slurm_state(job: SubmittedJob) -> JobState | None:
    """Return the state. Slurm's `code:signal` is 0:0 for many jobs that Slurm ended itself."""
    words = ("--oneliner", *([f"--clusters={job.cluster}"] if job.cluster else []), "show", "job", job.id)
    match = re.search(r" JobState=(\w+).* ExitCode=(\d+):(\d+)", _ask("scontrol", *words, about_job=True))
    if not match:
        return None
    word, code = match[1], int(match[2]) or (128 + int(match[3]) if int(match[3]) else 0)
    if code == 0 and word != "COMPLETED":
        code = {"CANCELLED": 143, "TIMEOUT": 124}.get(word, 1)
    return JobState(word, code if word in ENDED_IN_SLURM else None)


def _pbs_state(job: SubmittedJob) -> JobState | None:
    try:
        text = _ask("qstat", "-x", "-f", job.id, about_job=True)
    except ConfigError as error:
        if not re.search("option|history", str(error)):
            raise
        text = _ask("qstat", "-f", job.id, about_job=True)  # without a history of ended jobs
    if text.lstrip().startswith("<"):  # Torque's -x is for XML
        text = _ask("qstat", "-f", job.id, about_job=True)
    pairs: list[tuple[str, str]] = re.findall(r"^\s+(\w+) = (.*)$", re.sub(r"\n\t", "", text), re.MULTILINE)
    facts = dict(pairs)
    if "job_state" not in facts:
        return None
    code = facts.get("Exit_status", facts.get("exit_status", ""))
    number = int(code) if re.fullmatch(r"-?\d+", code) else None
    if number is not None and number >= 256:  # PBS adds 256 to a signal
        number = 128 + number % 128
    elif number is not None and (number < 0 or (number == 0 and facts.get("substate") in TERMINATED_IN_PBS)):
        number = 1  # ended by PBS, for example at its time limit
    return JobState(facts["job_state"], number)


def _flux_state(job: SubmittedJob) -> JobState | None:
    words = ("flux", "jobs", "-a", "--no-header", "--format={status}|{returncode}", job.id)
    word, bar, code = _ask(*words, about_job=True).strip().partition("|")
    number = int(code) if re.fullmatch(r"-?\d+", code) else None
    if number is not None and number < 0:  # a signal, or -128: cancelled before it started
        number = 143 if number == -128 else 128 - number
    if number == 0 and word != "COMPLETED":
        number = 1
    return JobState(word, number) if bar else None


ENDED_IN_SLURM = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED"),
)
TERMINATED_IN_PBS = ("91", "93")  # substates of a job that was deleted, or failed
SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Scheduler(
        submit=("sbatch", "--parsable"),
        depend=("--kill-on-invalid-dep=yes", "--dependency"),
        log="{name}-{id}.out",
        id=r"\d+",
        show="squeue --jobs={id}",
        cancel="scancel {id}",
        state=_slurm_state,
        ended=ENDED_IN_SLURM,
    ),
    "pbs": Scheduler(
        submit=("qsub", "-C", "#PBS"),  # with another prefix in PBS_DPREFIX, the script would have no options
        depend=("-W", "depend"),
        log="{name}.o{number}",
        id=r"\d+\S*",
        show="qstat {id}",
        cancel="qdel {id}",
        state=_pbs_state,
        ended=("F", "C", "X", "M"),  # M: on another server, C: Torque's
    ),
    "flux": Scheduler(
        submit=("flux", "batch"),
        depend=("--dependency",),
        log="{name}-{id}.out",
        id=r"\S+",
        show="flux jobs {id}",
        cancel="flux cancel {id}",
        state=_flux_state,
        ended=("COMPLETED", "FAILED", "CANCELED", "TIMEOUT", "INACTIVE"),
    ),
}
