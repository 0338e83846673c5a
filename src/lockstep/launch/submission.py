"""Submit batch scripts to Slurm, PBS and Flux, remember the jobs, and ask what has become of them.

| | submit | states | exit code | cancel |
|---|---|---|---|---|
| Slurm | `sbatch --parsable` | `squeue --states=all` | `scontrol show job`, else `sacct` | `scancel` |
| PBS | `qsub` | `qstat -f`, with `-x` for ended jobs in PBS Professional | the same | `qdel` |
| Flux | `flux batch` | `flux jobs -a` | the same | `flux cancel` |

The facts are from sbatch(1), squeue(1), scontrol(1), sacct(1), qsub(1B), qstat(1B), flux-batch(1) and flux-jobs(1).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lockstep.errors import ConfigError, first_line
from lockstep.files.jsonl import RecordWriter, read_records
from lockstep.files.output import say
from lockstep.world.batch_job import answer_of

ANSWER_SECONDS = 60.0  # a busy scheduler is slow
GONE = "ended"  # of a job that its scheduler no longer knows
ELSEWHERE = "elsewhere"  # of a job of another cluster, which may have the same home folders


@dataclass(frozen=True)
class JobState:
    """What a scheduler says of a job.

    Args:
        word: The scheduler's word, such as PENDING or R; GONE if it no longer knows the job.
        reason: Why the job waits, or "".
        code: The exit code of an ended job; None if it is unknown.
    """

    word: str
    reason: str = ""
    code: int | None = None


@dataclass(frozen=True)
class SubmittedJob:
    """A job that `lockstep submit` has submitted; paths are absolute, or "" if unknown."""

    system: str
    cluster: str
    """Of Slurm, whose clusters have equal numbers; "" of other systems, and of jobs that can be anywhere."""
    id: str
    name: str
    command: str
    folder: str
    script: str
    log: str
    run: str
    unix_time: float


@dataclass(frozen=True)
class Scheduler:
    """The programs of a batch system.

    Args:
        submit: Its arguments come before the script's name.
        depend: Its arguments for a dependency such as afterok:17.
        log: The name of a job's output file, from its {name} and {id}, or the {number} before its first dot.
        id: A pattern of its ids.
        states: Return the states of some jobs, without those that the scheduler no longer knows.
        ended: The words of jobs that have ended; with any other, a job may still run.
        waiting: The words of jobs that wait to run.
    """

    submit: tuple[str, ...]
    cancel: tuple[str, ...]
    depend: tuple[str, ...]
    log: str
    id: str
    states: Callable[[Sequence[str]], dict[str, JobState]]
    ended: tuple[str, ...]
    waiting: tuple[str, ...]


def ask(*words: str, advice: str = "try again", of_jobs: bool = False) -> str:
    """Return what a scheduler's command prints.

    Args:
        advice: What to do if it does not answer.
        of_jobs: It fails if its scheduler no longer knows some of the jobs; return what it prints of the others.

    Raises:
        ConfigError: There is no such program, it fails, or it does not answer.
    """
    code, printed, error = _run(*words, advice=advice)
    if code and not (of_jobs and re.search("unknown job ?id|jobid .*unknown|has finished", error, re.IGNORECASE)):
        raise ConfigError(f"{words[0]} failed: {error or f'exit code {code}'}")
    return printed


def _run(*words: str, advice: str = "try again") -> tuple[int, str, str]:
    """Return a command's exit code, its output, and what it wrote to stderr as one line."""
    try:
        return answer_of(*words, seconds=ANSWER_SECONDS)
    except FileNotFoundError:
        raise ConfigError(f"{words[0]} is not installed here; run this on a login node of the cluster") from None
    except OSError as error:
        raise ConfigError(f"{words[0]}: {error.strerror}; {advice}") from None


def _slurm_states(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the states of jobs: squeue has ended ones for some minutes (MinJobAge), sacct longer, if it is set up."""
    rows = ask("squeue", "--me", "--all", "--states=all", "--noheader", "--format=%i|%T|%r").splitlines()
    found = {job: JobState(word, reason) for job, word, reason in (row.split("|", 2) for row in rows) if job in jobs}
    for job, state in found.items():
        if state.word in ENDED_IN_SLURM:
            _, facts, _ = _run("scontrol", "--oneliner", "show", "job", job)
            found[job] = _ended_in_slurm(state.word, re.search(r" ExitCode=(\d+):(\d+)", facts))
    without_code = {job for job, state in found.items() if state.word in ENDED_IN_SLURM and state.code is None}
    if gone := [job for job in jobs if job not in found or job in without_code]:
        words = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,State,ExitCode")
        try:
            rows = _run(*words, f"--jobs={','.join(gone)}")[1].splitlines()
        except ConfigError:  # not installed
            rows = []
        for job, word, code in (row.split("|", 2) for row in rows):
            found[job] = _ended_in_slurm(word.split()[0], re.fullmatch(r"(\d+):(\d+)", code))
    return found


def _ended_in_slurm(word: str, match: re.Match[str] | None) -> JobState:
    """Return the state of a job with Slurm's `code:signal`, which is 0:0 for many jobs that were ended by Slurm."""
    code = None if match is None else int(match[1]) or (128 + int(match[2]) if int(match[2]) else 0)
    if code == 0 and word != "COMPLETED":
        code = {"CANCELLED": 143, "TIMEOUT": 124}.get(word, 1)
    return JobState(word, "", code if word in ENDED_IN_SLURM else None)


def _pbs_states(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the states of jobs, without ended ones if PBS keeps no history of them."""
    try:
        text = ask("qstat", "-x", "-f", *jobs, of_jobs=True)
    except ConfigError as error:
        if not re.search("option|history", str(error)):
            raise
        text = ask("qstat", "-f", *jobs, of_jobs=True)
    if text.lstrip().startswith("<"):  # Torque's -x is for XML
        text = ask("qstat", "-f", *jobs, of_jobs=True)
    found = {}
    for block in re.split(r"^Job Id: *", text, flags=re.MULTILINE)[1:]:
        pairs: list[tuple[str, str]] = re.findall(r"^\s+(\w+) = (.*)$", re.sub(r"\n\t", "", block), re.MULTILINE)
        facts = dict(pairs)
        code = facts.get("Exit_status", facts.get("exit_status", ""))
        number = int(code) if re.fullmatch(r"-?\d+", code) else None
        if number is not None and number >= 256:  # PBS adds 256 to a signal
            number = 128 + number % 128
        elif number is not None and (number < 0 or (number == 0 and facts.get("substate") in TERMINATED_IN_PBS)):
            number = 1  # ended by PBS, for example at its time limit
        found[block.split()[0]] = JobState(facts.get("job_state", GONE), facts.get("comment", ""), number)
    return found


def _flux_states(jobs: Sequence[str]) -> dict[str, JobState]:
    words = ("flux", "jobs", "-a", "--no-header", "--format={id.f58}|{status}|{returncode}")
    rows = ask(*words, *jobs, of_jobs=True)
    found = {}
    for job, word, code in (row.split("|", 2) for row in rows.splitlines()):
        number = int(code) if re.fullmatch(r"-?\d+", code) else None
        if number is not None and number < 0:  # a signal, or -128: cancelled before it started
            number = 143 if number == -128 else 128 - number
        if number == 0 and word != "COMPLETED":
            number = 1
        found[job] = JobState(word, "", number)
    return found


ENDED_IN_SLURM = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED"),
)
TERMINATED_IN_PBS = ("91", "93")  # substates of a job that was deleted, or failed
SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Scheduler(
        submit=("sbatch", "--parsable"),
        cancel=("scancel",),
        depend=("--kill-on-invalid-dep=yes", "--dependency"),
        log="{name}-{id}.out",
        id=r"\d+",
        states=_slurm_states,
        ended=ENDED_IN_SLURM,
        waiting=("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"),
    ),
    "pbs": Scheduler(
        submit=("qsub", "-C", "#PBS"),  # with another prefix in PBS_DPREFIX, the script would have no options
        cancel=("qdel",),
        depend=("-W", "depend"),
        log="{name}.o{number}",
        id=r"\d+\S*",
        states=_pbs_states,
        ended=("F", "C", "X", "M"),  # M: on another server, C: Torque's
        waiting=("Q", "H", "W"),
    ),
    "flux": Scheduler(
        submit=("flux", "batch"),
        cancel=("flux", "cancel"),
        depend=("--dependency",),
        log="{name}-{id}.out",
        id=r"\S+",
        states=_flux_states,
        ended=("COMPLETED", "FAILED", "CANCELED", "TIMEOUT", "INACTIVE"),
        waiting=("DEPEND", "PRIORITY", "SCHED"),
    ),
}


def cluster_here(system: str) -> str:
    """Return the name of the Slurm cluster; "" of other systems.

    Raises:
        ConfigError: The scheduler does not answer, or is not installed here.
    """
    if system != "slurm":
        return ""
    match = re.search(r"^ClusterName\s*= *(\S+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return match[1] if match else ""


def check_here(job: SubmittedJob) -> None:
    """Check that a job is one of this cluster, so that its number means no other job.

    Raises:
        ConfigError: It is not.
    """
    if (here := cluster_here(job.system)) != job.cluster:
        raise ConfigError(
            f"job {job.id} was submitted to the cluster {job.cluster}, and this is {here}; run this there"
        )


def submit(system: str, script: Path, dependency: str | None) -> tuple[str, str]:
    """Submit a script in the current folder; return the job's id and cluster.

    Raises:
        ConfigError: The scheduler refuses it, or does not print an id.
    """
    scheduler, here = SCHEDULERS[system], cluster_here(system)
    words = [*scheduler.submit]
    if dependency:
        *before, flag = scheduler.depend
        words += [*before, f"{flag}={dependency}"]
    look = "see whether the job is in the queue before you try again"
    printed = ask(*words, str(script), advice=look)
    job, _, cluster = (printed.split() or [""])[-1].partition(";")  # sbatch names a cluster that is not this one
    if not re.fullmatch(scheduler.id, job):
        raise ConfigError(f"{words[0]} printed {' '.join(printed.split())!r} instead of a job's id; {look}")
    return job, cluster or here


def log_of(system: str, name: str, job: str) -> str:
    """Return the name of a job's output file, which its script determines."""
    return SCHEDULERS[system].log.format(name=name, id=job, number=job.split(".")[0])


def jobs_file() -> Path:
    """Return the file of submitted jobs: in XDG_STATE_HOME, by default ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    root = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return root / "lockstep" / "jobs.jsonl"


def remember(job: SubmittedJob) -> None:
    """Append a job to the file of submitted jobs, whose lines other submissions may append to at the same time.

    If that fails, warn: the job has been submitted.
    """
    try:
        path = jobs_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = RecordWriter(path)
        writer.write(asdict(job))
        writer.close()
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        say(
            f"lockstep: warning: job {job.id} cannot be remembered ({first_line(error)}), so `lockstep jobs` will not "
            f"list it; set XDG_STATE_HOME to a folder that can be written"
        )


def remembered(folder: Path | None = None) -> list[SubmittedJob]:
    """Return the submitted jobs, of a folder or all, the oldest first; damaged lines are skipped.

    Raises:
        ConfigError: The file cannot be read.
    """
    jobs = []
    try:
        for record in read_records(jobs_file()):
            try:
                job = SubmittedJob(**{field.name: record[field.name] for field in fields(SubmittedJob)})
            except KeyError:
                continue
            if job.system in SCHEDULERS and folder in (None, Path(job.folder)):
                jobs.append(job)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{jobs_file()} cannot be read: {first_line(error)}") from None
    return jobs


def states_of(jobs: Sequence[SubmittedJob]) -> dict[SubmittedJob, JobState]:
    """Return the state of each job, by one call for each system.

    It is GONE if the scheduler no longer knows the job, and ELSEWHERE if the job is not one of this cluster.

    Raises:
        ConfigError: A scheduler that is installed here does not answer.
    """
    found = dict.fromkeys(jobs, JobState(ELSEWHERE))
    for system in dict.fromkeys(job.system for job in jobs):
        if not shutil.which(SCHEDULERS[system].submit[0]):
            continue
        here = cluster_here(system)
        own = {job.id: job for job in jobs if (job.system, job.cluster) == (system, here)}
        states = SCHEDULERS[system].states(list(own))
        found |= {job: states.get(number, JobState(GONE)) for number, job in own.items()}
    return found
