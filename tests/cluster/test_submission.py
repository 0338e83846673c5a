"""Jobs that `lockstep submit` gives to a real, small Slurm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runtimes import BOUND, make_image
from slurm import Slurm

pytestmark = pytest.mark.cold  # on hosts of their own

LOCKSTEP = [sys.executable, "-m", "lockstep"]
Lockstep = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def lockstep(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lockstep:
    """Runs a command of Lockstep on the login host, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}:{slurm.environment()['PATH']}"

    def command(*words: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        return slurm.run([*LOCKSTEP, *words], check=check, PATH=path, OMP_NUM_THREADS="1", **variables)

    return command


def test_submitted_job_runs_on_its_nodes(slurm: Slurm, lockstep: Lockstep, tmp_path: Path) -> None:
    job = ["--nodes", "2", "-np", "2", "--cpus-per-worker", "1", "--time", "00:10:00", "--name", "ranks"]
    program = ["python", "-S", "-c", "import os, sys; print('rank', os.environ['RANK'], 'é'); sys.exit(7)"]
    done = lockstep("submit", "slurm", *job, "--", *program)
    number = done.stdout.split()[2]
    shown = f"state: squeue --jobs={number}; output: tail -F ranks-{number}.out; to cancel it: scancel {number}"
    assert done.stdout.splitlines()[1] == shown
    assert (tmp_path / "lockstep-jobs" / "ranks-1.sh").read_text().startswith("#!/bin/bash\n# 2 nodes")
    assert slurm.wait_for_end(number) == "FAILED"
    assert {"rank 0 é", "rank 1 é"} <= set((tmp_path / f"ranks-{number}.out").read_text().splitlines())
    slurm.wait_until_idle()


def test_a_refused_job_shows_the_schedulers_reason(lockstep: Lockstep, tmp_path: Path) -> None:
    refused = lockstep("submit", "slurm", "--queue", "nowhere", "--", "true", check=False)
    assert refused.returncode == 2
    assert "lockstep submit: error: sbatch failed: " in refused.stderr
    assert "invalid partition specified: nowhere" in refused.stderr


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("ch-run"), reason="ch-run is not installed")
def test_a_job_in_a_container_on_two_nodes(slurm: Slurm, lockstep: Lockstep, tmp_path: Path) -> None:
    image = ["--container", str(make_image(tmp_path / "image")), "--bind-mount", BOUND]
    job = ["--nodes", "2", "-np", "2", "--cpus-per-worker", "1", "--time", "00:10:00", "--name", "inside"]
    program = "import lockstep, os; world = lockstep.connect(); print(world.sum(1), os.path.exists('/var'))"
    number = lockstep("submit", "slurm", *job, *image, "--", "python3", "-c", program).stdout.split()[2]
    assert slurm.wait_for_end(number) == "COMPLETED"
    assert (tmp_path / f"inside-{number}.out").read_text().splitlines().count("2.0 False") == 2
    slurm.wait_until_idle()
