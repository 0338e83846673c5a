"""`lockstep script slurm` in a real Slurm: it is accepted, queued again after a stop, and not after `scancel`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm import Slurm

from lockstep.launch.plan.batch_script import BatchJob, render

pytestmark = pytest.mark.cold  # on hosts of their own

JOB = BatchJob(nodes=2, workers=4, cpus_per_worker=1, time="00:20:00")
# Ends with 75 after a signal, as a launcher whose workers have written a checkpoint; the second time it ends well.
LAUNCHER = """#!/bin/bash
trap 'stopped=yes' USR1 TERM
echo "started with $*"
[ -z "$SLURM_RESTART_COUNT" ] || exit 0
while [ -z "$stopped" ]; do sleep 0.1; done
exit 75
"""


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Submits a script whose launcher is a stand-in, from a folder of its own: the job's number, once it runs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lockstep").write_text(LAUNCHER)
    (tmp_path / "bin" / "lockstep").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(render("slurm", JOB, ("python", "train.py")))

    def start(*options: str) -> str:
        path = f"{tmp_path}/bin:{slurm.environment()['PATH']}"
        job = slurm.run(["sbatch", "--parsable", *options, "job.sh"], PATH=path).stdout.strip()
        if "--test-only" not in options:
            wait_for(lambda: "started" in output(tmp_path, job))
        return job

    return start


def output(folder: Path, job: str) -> str:
    file = folder / f"lockstep-{job}.out"
    return file.read_text() if file.exists() else ""


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def facts(slurm: Slurm, job: str) -> dict[str, str]:
    words = slurm.run(["scontrol", "show", "job", job]).stdout.split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_slurm_takes_the_script(slurm: Slurm, submit: Callable[..., str]) -> None:
    submit("--test-only")
    golden = Path(__file__).parents[1] / "single" / "launch" / "plan" / "golden" / "slurm-cpus.sh"
    taken = slurm.run(["sbatch", "--test-only", str(golden)]).stderr
    assert "using 8 processors" in taken


def test_stopped_job_is_requeued_and_appends_to_the_same_file(
    slurm: Slurm, submit: Callable[..., str], tmp_path: Path
) -> None:
    job = submit()
    slurm.run(["scancel", "--batch", "--signal=USR1", job])  # as --signal=B:USR1@120 ahead of the time limit
    wait_for(lambda: facts(slurm, job)["Restarts"] == "1" and facts(slurm, job)["JobState"] == "PENDING")
    # Slurm itself waits two minutes; within the second of its end, a node takes the job for one already killed.
    slurm.run(["scontrol", "update", f"JobId={job}", "StartTime=now+3"])
    wait_for(lambda: facts(slurm, job)["JobState"] == "COMPLETED", seconds=180)
    assert output(tmp_path, job).count("started with run -- python train.py\n") == 2
    slurm.wait_until_idle()


def test_a_cancelled_job_is_not_queued_again(slurm: Slurm, submit: Callable[..., str]) -> None:
    job = submit()
    slurm.run(["scancel", job])
    slurm.wait_until_idle()
    found = facts(slurm, job)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")


def test_a_preempted_job_is_queued_again(slurm: Slurm, submit: Callable[..., str]) -> None:
    job = submit()
    urgent = ["sbatch", "--wait", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    slurm.run(urgent)
    assert facts(slurm, job)["Restarts"] == "1"
    slurm.run(["scancel", job])
    slurm.wait_until_idle()
