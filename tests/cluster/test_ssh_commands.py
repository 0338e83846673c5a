"""Commands on several hosts: doctor, studies, reports of hangs, and killed processes."""

from __future__ import annotations

import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import chaos
import pytest
from hosts import HEAD, Bed
from slurm import Slurm
from ssh_job import Job
from time_limits import extended

from lockstep.errors import HangError
from lockstep.files.jsonl import read_records

pytestmark = pytest.mark.cold  # on hosts of their own


STRUCK = [
    ("raw", "link", False, "node1"),  # where the workers' store is
    ("images", "loader", False, ""),
    ("raw", "launcher", True, ""),
    ("raw", "sshd", False, "node2"),
    ("raw", "guard", False, "node2"),
]


@pytest.mark.parametrize(
    ("job", "part", "at_start", "host"),
    [
        ("raw", "launcher", False, ""),
        ("raw", "node", False, ""),
        *(pytest.param(*case, marks=pytest.mark.long) for case in STRUCK),
    ],
)
def test_job_ends_in_time_without_leftovers_whatever_is_killed(
    bed: Bed, tmp_path: Path, job: str, part: str, at_start: bool, host: str
) -> None:
    this = chaos.Round(1, job, part, at_start, host=host, patience=3.0)
    chaos.play(bed, tmp_path / "job", this, random.Random(0))
    assert this.breaches == [], this.row()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_random_kills_leave_nothing(bed: Bed, tmp_path: Path) -> None:
    chance = random.Random()
    rounds = [chaos.draw(number, chance) for number in range(50)]
    for this in rounds:
        chaos.play(bed, tmp_path / str(this.number), this, chance)
        print(this.row(), flush=True)
    assert not [this.row() for this in rounds if this.breaches]


LIMIT = 50e6
UNITS = {"Mbit/s": 1e6, "Gbit/s": 1e9}


def doctor(bed: Bed, folder: Path, hosts: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", "doctor", "-H", hosts, f"--ssh-option={bed.ssh_options}"]
    process = bed.start(HEAD, command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = extended(lambda seconds: process.communicate(timeout=seconds))
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def bandwidths(said: str) -> dict[str, float]:
    """Bits a second, by the hosts between which they were measured."""
    rows = re.findall(r"^ *(\w+ and \w+|all together) .*?([\d.]+) ([MG]bit/s)", said, re.MULTILINE)
    return {names: float(number) * UNITS[unit] for names, number, unit in rows}


def test_a_limited_link_is_measured_and_named(bed: Bed, tmp_path: Path) -> None:
    bed.limit("node3", "50mbit")
    done = doctor(bed, tmp_path, "node1:2,node2,node3")
    assert done.returncode == 1, done.stderr
    assert "did not work together" not in done.stderr
    for name in bed.names:
        assert re.search(rf"^ *{name} .*{bed.interfaces[name]} {bed.addresses[name]}", done.stdout, re.MULTILINE)
    speeds = bandwidths(done.stdout)
    for names in ("node2 and node3", "node3 and node1", "all together"):
        assert LIMIT / 4 < speeds[names] < 2 * LIMIT
        assert f"{names.replace('all', 'all hosts')}: " in done.stdout
    assert speeds["node1 and node2"] > 2 * LIMIT
    assert [path for name in bed.names for path in bed.files(name)] == []


def test_a_host_that_does_not_start_is_the_launchers_error(bed: Bed, tmp_path: Path) -> None:
    done = doctor(bed, tmp_path, "node1,closed")
    assert done.returncode == 3
    assert "closed has no SSH server" in done.stderr
    assert done.stdout == ""


HANGING = Path(__file__).parents[1] / "support/hanging.py"


@pytest.mark.long
@pytest.mark.parametrize(("engine", "kind"), [("ddp", "stop"), ("hvd", "data")])
def test_the_rank_and_its_host_are_named(bed: Bed, tmp_path: Path, engine: str, kind: str) -> None:
    command = [sys.executable, str(HANGING), engine, kind, "1"]
    options = ["--hang-timeout", "5"]
    with Job(bed, tmp_path, command=command, hosts="node1:1,node2:1", options=options) as job:
        code = job.wait()
    assert code == HangError.exit_code, job.stderr
    assert re.search(r"^lockstep: rank 1 \(host node2\) has not entered ", job.stderr, re.MULTILINE)
    assert job.stderr.rstrip().endswith("lockstep: the job hung; all workers were stopped")
    assert not job.survivors()


STUDY = [sys.executable, "-m", "lockstep", "study", "scaling", "--np", "1,2", "--repeats", "1", "--steps", "3"]
TRAINING = ["--warmup-steps", "1", "--mode", "weak", "--", "digits", "-b", "16", "--device", "cpu"]
PROGRAM = [
    sys.executable,
    str(Path(__file__).parents[1] / "support/slow_program.py"),
    "ddp",
    "none",
    "0",
    "0",
    "1000000",
]
JOBS = {
    "training": (TRAINING, {1: (1, 16), 2: (2, 32)}, "2 workers, global batch 32"),
    "program": (["--", *PROGRAM], {1: (1, None), 2: (2, None)}, "2 workers"),
    "program, strong": (["--global-batch", "32", "--", *PROGRAM, "{batch}"], {1: (1, 32), 2: (2, 32)}, "2 workers"),
}


def _nodes(folder: Path) -> dict[int, tuple[int, int | None]]:
    """Nodes and global batch by workers."""
    records = list(read_records(folder / "study" / "scaling.jsonl"))
    assert not any("failed" in record for record in records), records
    assert all(record["split_seconds"]["forward"] > 0 for record in records)
    return {record["workers"]: (record["nodes"], record["global_batch"]) for record in records}


@pytest.mark.long
@pytest.mark.parametrize("job", ["training", "program"])
def test_a_scaling_study_on_hosts_reached_by_ssh(bed: Bed, tmp_path: Path, job: str) -> None:
    words, nodes, about = JOBS[job]
    hosts = ["-H", "node1:1,node2:1", f"--ssh-option={bed.ssh_options}"]
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        study = bed.start(
            HEAD,
            [*STUDY, *hosts, *words],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    assert extended(study.wait, 250) == 0, output.read_text()
    assert f"{about} (1 on node1, 1 on node2): weak" in output.read_text()
    assert _nodes(tmp_path) == nodes


@pytest.mark.long
@pytest.mark.parametrize("job", ["training", "program, strong"])
def test_a_scaling_study_in_an_allocation_of_slurm(slurm: Slurm, tmp_path: Path, job: str) -> None:
    words, nodes, _ = JOBS[job]
    printed = slurm.sbatch(
        f"#!/bin/bash -l\n#SBATCH --time=10\n#SBATCH --comment=secret\ncd {tmp_path}\n{shlex.join([*STUDY, *words])}\n",
        *("--nodes=2", "--ntasks-per-node=1"),
    )
    assert "2 measurements, 0 of them already recorded" in printed
    assert _nodes(tmp_path) == nodes
    for record in read_records(tmp_path / "study" / "scaling.jsonl"):
        assert (record["batch_system"], record["batch_requests"]) == ("Slurm", ["#SBATCH --time=10"])
