"""Jobs that `lockstep submit` gives to a real, small Slurm."""

from __future__ import annotations

import json
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
    """Runs a command of Lockstep on the login host, in a folder and with a state folder of its own."""
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}:{slurm.environment()['PATH']}"

    def command(*words: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        state = {"XDG_STATE_HOME": str(tmp_path / "state"), "PATH": path, "OMP_NUM_THREADS": "1"}
        return slurm.run([*LOCKSTEP, *words], check=check, timeout=240, **state, **variables)

    return command


def test_a_followed_job_gives_its_output_with_its_exit_code(slurm: Slurm, lockstep: Lockstep, tmp_path: Path) -> None:
    job = ["--nodes", "2", "-np", "2", "--cpus-per-worker", "1", "--time", "00:10:00", "--name", "ranks"]
    program = ["python", "-c", "import os, sys; print('rank', os.environ['RANK'], 'é'); sys.exit(7)"]
    done = lockstep("submit", "slurm", *job, "--follow", "--", *program, check=False)
    assert done.returncode == 7, done.stderr
    number = done.stdout.split()[2]
    assert {"rank 0 é", "rank 1 é"} <= set(done.stdout.splitlines())
    assert done.stderr.splitlines()[-1] == f"lockstep: job {number}: FAILED, exit code 7"
    assert (tmp_path / "lockstep-jobs" / "ranks-1.sh").read_text().startswith("#!/bin/bash\n# 2 nodes")
    row = lockstep("jobs").stdout.splitlines()[1]
    assert row.split()[:5] == [number, "ranks", "failed,", "exit", "code"]
    assert f"ranks-{number}.out" in row
    slurm.wait_until_idle()


def test_a_waiting_job_is_listed_with_its_reason_until_cancelled(slurm: Slurm, lockstep: Lockstep) -> None:
    first = lockstep("submit", "slurm", "-np", "1", "--", "sleep", "300").stdout.split()[2]
    second = lockstep("submit", "slurm", "--dependency", f"afterok:{first}", "--", "true").stdout.split()[2]
    rows = lockstep("jobs").stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["job", second, first]
    assert "pending (Dependency)" in rows[1]
    assert lockstep("jobs", "--cancel", first, second).stdout == f"cancelled job {first}\ncancelled job {second}\n"
    slurm.wait_until_idle()
    followed = lockstep("jobs", "--follow", second, check=False)
    assert followed.returncode == 143, followed.stderr  # cancelled before it started: Slurm itself says 0:0
    assert [row.split()[2].rstrip(",") for row in lockstep("jobs").stdout.splitlines()[1:]] == ["cancelled"] * 2


def test_a_refused_job_shows_the_schedulers_reason(lockstep: Lockstep, tmp_path: Path) -> None:
    refused = lockstep("submit", "slurm", "--queue", "nowhere", "--", "true", check=False)
    assert refused.returncode == 2
    assert "lockstep submit: error: sbatch failed: " in refused.stderr
    assert "invalid partition specified: nowhere" in refused.stderr
    assert lockstep("jobs").stdout.startswith("no job was submitted from this folder")
    unknown = lockstep("jobs", "--cancel", "99", check=False)
    assert (unknown.returncode, "99: not submitted with `lockstep submit`" in unknown.stderr) == (2, True)


def test_typed_flags_win_over_variables_of_sbatch(slurm: Slurm, lockstep: Lockstep, tmp_path: Path) -> None:
    variables = {"TIMELIMIT": "5", "PARTITION": "work", "ARRAY_INX": "1-3", "SIGNAL": "HUP@10", "ACCOUNT": "other"}
    variables |= {"NO_REQUEUE": "1", "ERROR": "elsewhere", "OUTPUT": "elsewhere", "JOB_NAME": "other"}
    own = {f"SBATCH_{name}": value for name, value in variables.items()}
    typed = ["--time", "00:20:00", "--partition", "urgent", "--account", "me", "--name", "typed"]
    done = lockstep("submit", "slurm", *typed, "--", "sh", "-c", "echo trouble >&2", **own)
    number = done.stdout.split()[2]
    facts = slurm.run(["scontrol", "--oneliner", "show", "job", number]).stdout.split()
    wanted = {"TimeLimit=00:20:00", "Partition=urgent", "Account=me", "JobName=typed", "Requeue=1"}
    assert wanted <= set(facts), facts
    assert not [fact for fact in facts if fact.startswith("Array")]
    assert slurm.wait_for_end(number) == "COMPLETED"
    assert "trouble" in (tmp_path / f"typed-{number}.out").read_text()
    default = lockstep("submit", "slurm", "--", "true", SBATCH_TIMELIMIT="5").stdout.split()[2]
    assert "TimeLimit=00:05:00" in slurm.run(["scontrol", "--oneliner", "show", "job", default]).stdout
    slurm.wait_until_idle()


@pytest.mark.skipif(not shutil.which("ch-run"), reason="ch-run is not installed")
def test_a_job_in_a_container_on_two_nodes(slurm: Slurm, lockstep: Lockstep, tmp_path: Path) -> None:
    image = ["--container", str(make_image(tmp_path / "image")), "--bind-mount", BOUND]
    job = ["--nodes", "2", "-np", "2", "--cpus-per-worker", "1", "--time", "00:10:00", "--name", "inside"]
    program = "import lockstep, os; world = lockstep.connect(); print(world.sum(1), os.path.exists('/var'))"
    done = lockstep("submit", "slurm", *job, *image, "--follow", "--", "python3", "-c", program, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines().count("2.0 False") == 2
    slurm.wait_until_idle()


PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_study_is_a_job_for_each_number_of_workers(slurm: Slurm, lockstep: Lockstep, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    flags = ["-np", "1,2", "--mode", "weak", "--repeats", "1", "--steps", "5"]
    study = ["lockstep", "study", "scaling", *flags, "--", "python", "train.py"]
    job = ["--nodes", "2", "-np", "2", "--cpus-per-worker", "1", "--name", "scale"]
    printed = lockstep("submit", "slurm", *job, "--", *study).stdout.splitlines()
    jobs = [line.split()[2] for line in printed[:2]]
    assert printed[2] == "when all have ended: lockstep report study/scaling-1.jsonl study/scaling-2.jsonl"
    for number, name in zip(jobs, ("scale-1", "scale-2"), strict=True):
        assert slurm.wait_for_end(number) == "COMPLETED", (tmp_path / f"{name}-{number}.out").read_text()
    for workers in (1, 2):
        (record,) = map(json.loads, (tmp_path / f"study/scaling-{workers}.jsonl").read_text().splitlines())
        assert (record["workers"], record["nodes"], "failed" in record) == (workers, workers, False)
    lockstep("report", "study/scaling-1.jsonl", "study/scaling-2.jsonl")
    assert "python train.py" in (tmp_path / "report" / "RESULTS.md").read_text()
    slurm.wait_until_idle()
