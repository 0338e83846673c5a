"""What a batch job's environment says of its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.config.time_limit import TimeLeft
from lockstep.world.batch_time_left import age_of, ask_squeue, job_age, time_left


@pytest.mark.parametrize(
    ("environment", "squeue", "expected"),
    [
        ({}, "", None),
        ({"SLURM_JOB_END_TIME": "5000"}, "", None),  # of no job
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "5000"}, "", TimeLeft(4000, "SLURM_JOB_END_TIME")),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "900"}, "", None),  # left over from a job that has ended
        ({"SLURM_JOB_ID": "7"}, "2-01:00:05", TimeLeft(176405, "squeue of job 7")),
        ({"SLURM_JOB_ID": "7"}, "4:59", TimeLeft(299, "squeue of job 7")),
        *(({"SLURM_JOB_ID": "7"}, word, None) for word in ("UNLIMITED", "INVALID", "")),
        ({"PBS_JOBID": "7.server", "PBS_WALLTIME": "3600"}, "", TimeLeft(3500, "PBS_WALLTIME")),
        ({"PBS_JOBID": "7.server", "PBS_WALLTIME": "90"}, "", None),
        ({"PBS_JOBID": "7.server", "PBS_WALLTIME": "96:00:00"}, "", None),  # a script's own variable
        ({"PBS_JOBID": "7.server"}, "", None),
    ],
)
def test_what_is_left_of_a_job(environment: dict[str, str], squeue: str, expected: TimeLeft | None) -> None:
    asked = []
    left = time_left(environment, now=lambda: 1000.0, ask=lambda job: asked.append(job) or squeue, age=lambda _: 100.0)
    assert left == expected
    assert asked == (["7"] if environment == {"SLURM_JOB_ID": "7"} else [])


def test_squeue_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_squeue("7") == ""  # there is none
    (tmp_path / "squeue").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setattr("lockstep.world.batch_time_left.ASK_SECONDS", 0.2)
    assert ask_squeue("7") == ""


@pytest.mark.cold
def test_the_age_of_a_job_is_that_of_its_oldest_process() -> None:
    code = "import lockstep.world.batch_time_left as j; print(j.job_age('PBS_JOBID'), j.age_of(j.os.getpid()))"
    script = f'sleep 1; {sys.executable} -c "{code}"; :'  # the shell stays
    start = time.monotonic()
    done = subprocess.run(["sh", "-c", script], env={**os.environ, "PBS_JOBID": "7"}, capture_output=True, check=True)
    job, own = map(float, done.stdout.split())
    assert own + 0.9 < job < time.monotonic() - start + 0.1
    assert age_of(os.getpid()) > job  # this process has no such variable, and is older


def test_variable_that_no_ancestor_has_is_this_processes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBS_JOBID", "7")
    assert job_age("PBS_JOBID") == pytest.approx(age_of(os.getpid()), abs=0.5)
