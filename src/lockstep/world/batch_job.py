"""The batch job of this process: how long it may still run, and its restarts and requeues.

The remaining time:

| system | source |
|---|---|
| Slurm | SLURM_JOB_END_TIME, seconds since 1970; if not set, as in 22.05, one call of `squeue` |
| Torque | PBS_WALLTIME, the job's limit in seconds, counted from the start of the job's first process |
| Flux | `flux job timeleft`, in the environment of a job, which has FLUX_URI |

PBS Professional, LSF and Grid Engine pass no limit to their jobs. The facts are from sbatch(1), squeue(1),
flux-environment(7), flux-job(1) and Torque's table of exported batch variables. A limit that cannot be read or has
already passed (in a terminal that outlived its job) is ignored, so that training does not fail because of it.

The series of jobs, whose members are numbered from 0; other batch systems do not number the runs of a job:

| series | source |
|---|---|
| starts of one job's workers (`--max-restarts`) | LOCKSTEP_SNAPSHOTS, TORCHELASTIC_RESTART_COUNT |
| runs of a requeued Slurm job | SLURM_JOB_ID, SLURM_CLUSTER_NAME, SLURM_RESTART_COUNT (sbatch(1)) |
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import psutil

from lockstep.config.values import TimeLeft, parse_time_limit
from lockstep.files.untrusted import open_plain
from lockstep.world import STARTED
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.slurm_hostlist import expand

ASK_SECONDS = 5.0


def answer_of(*words: str, seconds: float) -> tuple[int, str, str]:
    """Run a scheduler's command; return its exit code, its output, and what it wrote to stderr as one line.

    Raises:
        OSError: The program is missing, cannot be run, or does not answer within the time.
    """
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:g} seconds") from None
    return done.returncode, done.stdout, " ".join(done.stderr.split())


def ask_scheduler(*words: str, seconds: float = ASK_SECONDS) -> str:
    """Return what a scheduler's command prints; "" if it fails.

    Raises:
        ValueError: The program is missing, or does not answer in time.
    """
    try:
        code, printed, _ = answer_of(*words, seconds=seconds)
    except OSError as error:
        raise ValueError(f"`{' '.join(words)}`: {error.strerror}") from None
    return "" if code else printed.strip()


def flux_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return the hosts of this process's Flux job, in the order of their nodes; none outside of one.

    A task of `flux run` has its job's id; the script of `flux batch` or `flux alloc` is in an instance that is a job.

    Raises:
        ValueError: Flux does not list the hosts.
    """
    if job := environment.get("FLUX_JOB_ID"):
        try:
            names = ",".join(json.loads(ask_scheduler("flux", "job", "info", job, "R"))["execution"]["nodelist"])
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ValueError(f"`flux job info {job} R` does not list the job's hosts") from None
    elif "FLUX_URI" in environment and ask_scheduler("flux", "getattr", "jobid"):
        names = ask_scheduler("flux", "getattr", "hostlist")
    else:
        return []
    return expand(names)


def job_age(variable: str) -> float:
    """Return the age in seconds of the oldest ancestor, or this process, with this process's value of `variable`.

    Measured on the clock since boot, which setting the wall clock does not change.
    """
    return max([age_of(os.getpid()), *(age_of(parent.pid) for parent in _members(variable))])


def _members(variable: str) -> Iterator[psutil.Process]:
    """Yield the ancestors of this process that have its value of `variable`, the nearest first."""
    for parent in psutil.Process().parents():
        try:
            if parent.environ().get(variable) != os.environ[variable]:
                return
            yield parent
        except (psutil.Error, OSError):
            return


def launch_age() -> float:
    """Return the seconds since this job, or without Lockstep's launcher this process, started; before any restarts."""
    started = os.environ.get(STARTED)
    return time.time() - float(started) if started else age_of(os.getpid())


def age_of(pid: int) -> float:
    """Return the seconds since a process of this machine started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def time_left(environment: Mapping[str, str]) -> TimeLeft | None:
    """Return the remaining time of the batch job that `environment` describes; None outside of a job or if unknown."""
    left: float | None = None
    source = ""
    with suppress(ValueError):  # the scheduler does not answer, or prints something else, such as INVALID
        if job := environment.get("SLURM_JOB_ID"):
            end = environment.get("SLURM_JOB_END_TIME", "")
            if end.isdecimal():
                left, source = int(end) - time.time(), "SLURM_JOB_END_TIME"
            else:
                printed = ask_scheduler("squeue", "--noheader", f"--jobs={job}", "--format=%L")
                left, source = parse_time_limit(printed), f"squeue of job {job}"
        elif environment.get("FLUX_URI"):
            left, source = float(ask_scheduler("flux", "job", "timeleft")), "flux job timeleft"
        elif environment.get("PBS_JOBID") and environment.get("PBS_WALLTIME", "").isdecimal():
            left, source = int(environment["PBS_WALLTIME"]) - job_age("PBS_JOBID"), "PBS_WALLTIME"
    return TimeLeft(left, source) if left is not None and 0 < left < inf else None


BATCH_JOBS = (
    ("Slurm", "SLURM_JOB_ID"),
    ("PBS", "PBS_JOBID"),
    ("LSF", "LSB_JOBID"),
    ("Flux", "FLUX_JOB_ID"),
)


RESOURCES = re.compile(  # requests of a batch script, without those that name people, accounts, variables and files
    r"^#(?:SBATCH|PBS|BSUB)[ \t]+(?:-[NnctpGCqlRW]|-gpu|-nnodes|--(?:nodes|ntasks|cpus|gpus|gres|mem|time"
    r"|partition|qos|constraint|exclusive|threads-per-core|hint))(?![A-Za-z])[^\r\n]*",
    re.MULTILINE,
)
MAX_SCRIPT_BYTES = 1 << 16


def describe_requests(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the name of the batch system and what the job's script requests, as far as the script can be read."""
    system, variable = next(((name, key) for name, key in BATCH_JOBS if environment.get(key)), ("", ""))
    if not system:
        return {}
    text = _script(variable)
    return {"batch_system": system, "batch_requests": RESOURCES.findall(text)} if text else {"batch_system": system}


def _script(variable: str) -> str:
    """Return the text of the script that the batch job of this process runs, by the arguments of its ancestors."""
    text = ""
    for parent in _members(variable):
        with suppress(psutil.Error, OSError, ValueError, IndexError):
            words = [word for word in parent.cmdline()[1:] if not word.startswith("-")]
            with open_plain(Path(parent.cwd(), words[0])) as file:  # of "bash -l /var/spool/slurmd/job17/slurm_script"
                found = file.read(MAX_SCRIPT_BYTES).decode(errors="replace")
            text = found if RESOURCES.search(found) else text
    return text


def describe_batch_job(environment: Mapping[str, str]) -> str:
    """Return the environment's batch job, such as "Slurm job 17"; "" outside of one."""
    jobs = (f"{system} job {environment[name]}" for system, name in BATCH_JOBS if environment.get(name))
    return next(jobs, "")


def series_of(rank_info: RankInfo, environment: Mapping[str, str]) -> dict[str, int]:
    """Return the series that this process's job belongs to, with its number in each; see `files.folder_lock.Owner`."""
    series = {}
    if rank_info.snapshots is not None:
        series[f"starts of {rank_info.snapshots.name}"] = rank_info.restart
    if job := environment.get("SLURM_JOB_ID"):
        runs = environment.get("SLURM_RESTART_COUNT", "0")
        series[f"Slurm job {job} of {environment.get('SLURM_CLUSTER_NAME', '')}"] = int(runs) if runs.isdecimal() else 0
    return series
