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
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lockstep.errors import ConfigError, first_line
from lockstep.files.jsonl import RecordWriter, read_records

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
        log: The name of a job's output file, from its {name} and {id}.
        states: Return the states of some jobs, without those that the scheduler no longer knows.
    """

    submit: tuple[str, ...]
    cancel: tuple[str, ...]
    depend: tuple[str, ...]
    log: str
    states: Callable[[Sequence[str]], dict[str, JobState]]
    running: tuple[str, ...]
    """The words of jobs that run."""
    waiting: tuple[str, ...]
    """The words of jobs that wait to run, or to end."""

    def has_ended(self, state: JobState) -> bool:
        """Whether a job in this state has ended."""
        return state.word not in (*self.running, *self.waiting)


def ask(*words: str) -> str:
    """Return what a scheduler's command prints.

    Raises:
        ConfigError: There is no such program, it fails, or it does not answer.
    """
    code, printed, error = _run(*words)
    if code:
        raise ConfigError(f"{words[0]} failed: {error or f'exit code {code}'}")
    return printed


def _ask_of_jobs(*words: str) -> str:
    """Return what a command prints of the jobs that its scheduler knows; for others, it fails.

    Raises:
        ConfigError: It fails for another reason, so that the jobs may well exist.
    """
    code, printed, error = _run(*words)
    if code and not re.search("unknown|invalid job id|has finished", error, re.IGNORECASE):
        raise ConfigError(f"{words[0]} failed: {error or f'exit code {code}'}")
    return printed


def _run(*words: str) -> tuple[int, str, str]:
    """Return a command's exit code, its output, and what it wrote to stderr as one line."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
    except FileNotFoundError:
        raise ConfigError(f"{words[0]} is not installed here; run this on a login node of the cluster") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or f"no answer within {ANSWER_SECONDS:g} seconds"
        raise ConfigError(f"{words[0]}: {reason}; try again") from None
    return done.returncode, done.stdout, " ".join(done.stderr.split())


def _slurm_states(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the states of jobs: squeue has ended ones for some minutes (MinJobAge), sacct longer, if it is set up."""
    rows = ask("squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%r").splitlines()
    found = {job: JobState(word, reason) for job, word, reason in (row.split("|", 2) for row in rows) if job in jobs}
    for job, state in found.items():
        if state.word not in (*RUNNING_IN_SLURM, *WAITING_IN_SLURM):
            _, facts, _ = _run("scontrol", "--oneliner", "show", "job", job)
            found[job] = JobState(state.word, "", _code(re.search(r" ExitCode=(\d+):(\d+)", facts)))
    if gone := [job for job in jobs if job not in found]:
        words = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,State,ExitCode")
        try:
            rows = _run(*words, f"--jobs={','.join(gone)}")[1].splitlines()
        except ConfigError:  # not installed
            rows = []
        for job, word, code in (row.split("|", 2) for row in rows):
            found[job] = JobState(word.split()[0], "", _code(re.fullmatch(r"(\d+):(\d+)", code)))
    return found


def _code(match: re.Match[str] | None) -> int | None:
    """Return an exit code as a shell shows it, from Slurm's `code:signal`."""
    return None if match is None else int(match[1]) or (128 + int(match[2]) if int(match[2]) else 0)


def _pbs_states(jobs: Sequence[str]) -> dict[str, JobState]:
    try:
        text = _ask_of_jobs("qstat", "-x", "-f", *jobs)
    except ConfigError as error:
        if "option" not in str(error):
            raise
        text = _ask_of_jobs("qstat", "-f", *jobs)  # of Torque
    found = {}
    for block in re.split(r"^Job Id: *", text, flags=re.MULTILINE)[1:]:
        pairs: list[tuple[str, str]] = re.findall(r"^\s+(\w+) = (.*)$", re.sub(r"\n\t", "", block), re.MULTILINE)
        facts = dict(pairs)
        code = facts.get("Exit_status", facts.get("exit_status", ""))
        number = int(code) if re.fullmatch(r"-?\d+", code) else None
        known = None if number is None else number % 256 + 128 if number > 256 else number  # PBS adds 256 to a signal
        found[block.split()[0]] = JobState(facts.get("job_state", GONE), facts.get("comment", ""), known)
    return found


def _flux_states(jobs: Sequence[str]) -> dict[str, JobState]:
    rows = _ask_of_jobs("flux", "jobs", "-a", "--no-header", "--format={id.f58}|{status}|{returncode}", *jobs)
    found = {}
    for job, word, code in (row.split("|", 2) for row in rows.splitlines()):
        number = int(code) if re.fullmatch(r"-?\d+", code) else None
        found[job] = JobState(word, "", 128 - number if number is not None and number < 0 else number)
    return found


RUNNING_IN_SLURM = ("RUNNING", "SUSPENDED", "STOPPED")
WAITING_IN_SLURM = ("PENDING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "STAGE_OUT")
SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Scheduler(
        submit=("sbatch", "--parsable"),
        cancel=("scancel",),
        depend=("--dependency",),
        log="{name}-{id}.out",
        states=_slurm_states,
        running=RUNNING_IN_SLURM,
        waiting=WAITING_IN_SLURM,
    ),
    "pbs": Scheduler(
        submit=("qsub",),
        cancel=("qdel",),
        depend=("-W", "depend"),
        log="{name}.o{number}",
        states=_pbs_states,
        running=("R", "S", "B", "T", "U"),
        waiting=("Q", "H", "W", "E", "M"),
    ),
    "flux": Scheduler(
        submit=("flux", "batch"),
        cancel=("flux", "cancel"),
        depend=("--dependency",),
        log="{name}-{id}.out",
        states=_flux_states,
        running=("RUN",),
        waiting=("DEPEND", "PRIORITY", "SCHED", "CLEANUP"),
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


def submit(system: str, script: Path, dependency: str | None) -> str:
    """Submit a script in the current folder and return the job's id.

    Raises:
        ConfigError: The scheduler refuses it, or prints no id.
    """
    scheduler = SCHEDULERS[system]
    options: tuple[str, ...] = ()
    if dependency:
        *before, flag = scheduler.depend
        options = (*before, f"{flag}={dependency}")
    printed = ask(*scheduler.submit, *options, str(script)).split()
    job = printed[-1].split(";")[0] if printed else ""  # sbatch adds the cluster's name
    if not job:
        raise ConfigError(f"{scheduler.submit[0]} printed no job id for {script}; see whether the job is in the queue")
    return job


def log_of(system: str, name: str, job: str) -> str:
    """Return the name of a job's output file, which its script determines."""
    return SCHEDULERS[system].log.format(name=name, id=job, number=job.split(".")[0])


def jobs_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file of submitted jobs: in XDG_STATE_HOME, by default ~/.local/state."""
    state = environment.get("XDG_STATE_HOME", "")
    root = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return root / "lockstep" / "jobs.jsonl"


def remember(job: SubmittedJob) -> None:
    """Append a job to the file of submitted jobs, whose lines other submissions may append to at the same time.

    Raises:
        ConfigError: The file cannot be written; the job has been submitted.
    """
    path = jobs_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = RecordWriter(path)
        writer.write(asdict(job))
        writer.close()
    except OSError as error:
        raise ConfigError(
            f"job {job.id} is submitted, but {path} cannot be written ({error.strerror}), so `lockstep jobs` will not "
            f"list it; set XDG_STATE_HOME to a folder that can be written"
        ) from None


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
