"""The batch job of a process: its remaining time, and which jobs follow which."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import flux
import pytest

from lockstep.config.values import TimeLeft
from lockstep.files.folder_lock import Owner
from lockstep.world.batch_job import (
    RESOURCES,
    age_of,
    ask_scheduler,
    describe_batch_job,
    describe_requests,
    series_of,
    time_left,
)
from lockstep.world.launcher_environment import RankInfo


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that prints the variable SQUEUE if it is asked for what is left of job 7."""
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "squeue"
    program.write_text('#!/bin/sh\n[ "$*" = "--noheader --jobs=7 --format=%L" ] && echo "$SQUEUE"\n')
    program.chmod(0o755)
    return program


@pytest.mark.usefixtures("squeue")
@pytest.mark.parametrize(
    ("environment", "printed", "expected"),
    [
        ({}, "", None),
        ({"SLURM_JOB_END_TIME": "+4000"}, "", None),  # of no job
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "+4000"}, "1:00", TimeLeft(4000, "SLURM_JOB_END_TIME")),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "-100"}, "", None),  # left over from a job that has ended
        ({"SLURM_JOB_ID": "7"}, "2-01:00:05", TimeLeft(176405, "squeue of job 7")),
        ({"SLURM_JOB_ID": "7"}, "4:59", TimeLeft(299, "squeue of job 7")),
        *(({"SLURM_JOB_ID": "7"}, word, None) for word in ("UNLIMITED", "INVALID", "")),
        ({"PBS_JOBID": "7.server", "PBS_WALLTIME": "900000"}, "", TimeLeft(900000, "PBS_WALLTIME")),
        ({"PBS_JOBID": "7.server", "PBS_WALLTIME": "0"}, "", None),
        ({"PBS_JOBID": "7.server", "PBS_WALLTIME": "96:00:00"}, "", None),  # a script's own variable
        ({"PBS_JOBID": "7.server"}, "", None),
    ],
)
def test_what_is_left_of_a_job(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], printed: str, expected: TimeLeft | None
) -> None:
    monkeypatch.setenv("SQUEUE", printed)
    monkeypatch.setenv("PBS_JOBID", "7.server")  # whose first process is this one
    end = environment.get("SLURM_JOB_END_TIME")
    found = time_left({**environment, "SLURM_JOB_END_TIME": str(int(time.time()) + int(end))} if end else environment)
    if expected and expected.source == "PBS_WALLTIME":
        expected = TimeLeft(expected.seconds - age_of(os.getpid()), expected.source)
    if expected is None:
        assert found is None
    else:
        assert found
        assert found.source == expected.source
        assert found.seconds == pytest.approx(expected.seconds, abs=60)


def test_flux_says_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flux.use(tmp_path, "a", monkeypatch)
    assert time_left({"FLUX_URI": "local:///x"}) is None, "a job without a limit"
    monkeypatch.setenv("FAKE_FLUX_SECONDS", "118")
    assert time_left({"FLUX_URI": "local:///x"}) == TimeLeft(118, "flux job timeleft")
    monkeypatch.setenv("PATH", "/nowhere")
    assert time_left({"FLUX_URI": "local:///x"}) is None


def test_squeue_that_does_not_answer_is_not_waited_for(squeue: Path) -> None:
    squeue.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    with pytest.raises(ValueError, match=r"`squeue`: no answer within 0\.2 seconds"):
        ask_scheduler("squeue", seconds=0.2)
    squeue.unlink()
    assert time_left({"SLURM_JOB_ID": "7"}) is None


@pytest.mark.cold
def test_the_age_of_a_job_is_that_of_its_oldest_process() -> None:
    code = "import lockstep.world.batch_job as j; print(j.age_of(j.os.getpid()), j.job_age('PBS_JOBID'))"
    script = f'sleep 1; {sys.executable} -c "{code}"; :'  # the shell stays
    start = time.monotonic()
    done = subprocess.run(["sh", "-c", script], env={**os.environ, "PBS_JOBID": "7"}, capture_output=True, check=True)
    own, job = map(float, done.stdout.split())
    assert own + 0.9 < job < time.monotonic() - start + 0.1
    assert age_of(os.getpid()) > job  # this process has no such variable, and is older


def _owner(rank_info: RankInfo, **environment: str) -> Owner:
    return Owner("lockstep train", describe_batch_job(environment), series_of(rank_info, environment))


def test_the_batch_job_is_named() -> None:
    assert describe_batch_job({"SLURM_JOB_ID": "17"}) == "Slurm job 17"
    assert describe_batch_job({"PBS_JOBID": "17.server"}) == "PBS job 17.server"
    assert describe_batch_job({"LSB_JOBID": "17"}) == "LSF job 17"
    assert describe_batch_job({}) == ""


def test_a_requeued_slurm_job_follows_itself_and_nothing_else() -> None:
    first = _owner(RankInfo(), SLURM_JOB_ID="17", SLURM_CLUSTER_NAME="a")
    requeued = _owner(RankInfo(), SLURM_JOB_ID="17", SLURM_CLUSTER_NAME="a", SLURM_RESTART_COUNT="1")
    assert requeued.follows(first)
    assert not first.follows(requeued)
    assert not _owner(RankInfo(), SLURM_JOB_ID="17", SLURM_CLUSTER_NAME="a").follows(
        first
    )  # another step of the same job
    for other in ({"SLURM_JOB_ID": "18"}, {"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "b"}):
        assert not _owner(RankInfo(), **other, SLURM_RESTART_COUNT="1").follows(first)


def test_restarted_workers_follow_those_of_their_own_job() -> None:
    first = _owner(RankInfo(snapshots=Path("/dev/shm/job-a"), restart=0))
    assert _owner(RankInfo(snapshots=Path("/dev/shm/job-a"), restart=1)).follows(first)
    assert not _owner(RankInfo(snapshots=Path("/dev/shm/job-b"), restart=1)).follows(first)
    assert not _owner(RankInfo(restart=1)).follows(first)  # torchrun's run ids may be those of another job


@pytest.mark.parametrize(
    ("line", "is_recorded"),
    [
        ("#SBATCH --nodes=2", True),
        ("#SBATCH -N2", True),
        ("#SBATCH --gpus-per-node 4", True),
        ("#PBS -l select=2:ngpus=4", True),
        ("#BSUB -nnodes 2", True),
        ("#BSUB -gpu num=4", True),
        ("#SBATCH --account=secret", False),
        ("#SBATCH --export=TOKEN=secret", False),
        ("#PBS -v TOKEN=secret", False),
        ("#PBS -M name@example.org", False),
        ("export TOKEN=secret", False),
        ("echo '#SBATCH --nodes=2'", False),
    ],
)
def test_requests_of_a_batch_script_are_lines_about_resources(line: str, is_recorded: bool) -> None:
    assert RESOURCES.findall(f"#!/bin/sh\n{line}\r\nsrun hostname\n") == ([line] if is_recorded else [])


def test_outside_of_a_batch_job_there_are_no_requests() -> None:
    assert describe_requests({}) == {}


@pytest.mark.cold
def test_requests_are_read_from_the_running_batch_script(tmp_path: Path) -> None:
    code = "from lockstep.world.batch_job import describe_requests; print(describe_requests())"
    script = tmp_path / "job.sh"
    script.write_text(f'#SBATCH --nodes=2\n#SBATCH -A secret\n{sys.executable} -c "{code}"\n:\n')
    options: Any = {"env": {**os.environ, "SLURM_JOB_ID": "17"}, "capture_output": True, "text": True, "check": True}
    done = subprocess.run(["sh", "-u", script.name], cwd=tmp_path, **options)
    assert done.stdout == "{'batch_system': 'Slurm', 'batch_requests': ['#SBATCH --nodes=2']}\n"
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.stdout == "{'batch_system': 'Slurm'}\n"
