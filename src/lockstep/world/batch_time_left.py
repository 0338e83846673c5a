"""How long the batch job that this process stands in may still run, as far as its environment tells.

| system | what is read |
|---|---|
| Slurm | SLURM_JOB_END_TIME, seconds since 1970; where the job has none, as in 22.05, `squeue` is asked once |
| Torque | PBS_WALLTIME, the seconds that the job was given; they count from the start of the job's first process |

PBS Professional, LSF, Cobalt and Grid Engine tell their jobs of no limit. The facts are those of sbatch(1), squeue(1)
and of Torque's table of exported batch variables. What cannot be read, or has passed already (a terminal that has
outlived its job), is no limit: training must not fail for it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from lockstep.config.time_limit import TimeLeft, parse_time_limit

ASK_SECONDS = 5.0
NODE = "lockstep.launch.node"


def ask_squeue(job: str) -> str:
    """What Slurm says is left of a job; "" where it does not answer in time."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%L"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def job_age(variable: str) -> float:
    """The seconds since the start of the oldest process above this one, itself included, with our value of `variable`.

    Measured since the machine's start, so that nobody who sets the clock changes it.
    """
    oldest = age_of(os.getpid())
    for parent in psutil.Process().parents():
        try:
            if parent.environ().get(variable) != os.environ[variable]:
                break
            oldest = max(oldest, age_of(parent.pid))
        except (psutil.Error, OSError):
            break
    return oldest


def launch_age() -> float:
    """The seconds since this job was begun on this host: the age of the launcher's node process, or else our own."""
    for parent in psutil.Process().parents():
        try:
            if NODE in parent.cmdline():
                return age_of(parent.pid)
        except psutil.Error:
            break
    return age_of(os.getpid())


def age_of(pid: int) -> float:
    """The seconds since a process of this machine was started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def time_left(
    environment: Mapping[str, str],
    now: Callable[[], float] = time.time,
    ask: Callable[[str], str] = ask_squeue,
    age: Callable[[str], float] = job_age,
) -> TimeLeft | None:
    """What is left of the batch job that `environment` tells of; None outside of one, or where nothing tells.

    Args:
        now: The seconds since 1970.
        ask: Takes a job of Slurm, and returns what `squeue --format=%L` says of it.
        age: Takes a variable of this process, and returns for how many seconds processes have had it.
    """
    left: float | None = None
    source = ""
    if job := environment.get("SLURM_JOB_ID"):
        end = environment.get("SLURM_JOB_END_TIME", "")
        if end.isdecimal():
            left, source = int(end) - now(), "SLURM_JOB_END_TIME"
        else:
            left, source = _parsed(ask(job)), f"squeue of job {job}"
    elif environment.get("PBS_JOBID") and environment.get("PBS_WALLTIME", "").isdecimal():
        left, source = int(environment["PBS_WALLTIME"]) - age("PBS_JOBID"), "PBS_WALLTIME"
    return TimeLeft(left, source) if left is not None and left > 0 else None


def _parsed(text: str) -> float | None:
    try:
        return parse_time_limit(text)
    except ValueError:  # INVALID, NOT_SET, or nothing
        return None
