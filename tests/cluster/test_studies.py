"""Studies on several hosts: by ssh, and in an allocation of Slurm's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hosts import HEAD, Bed
from slurm import Slurm

from lockstep.files.jsonl import read_records

pytestmark = pytest.mark.cold  # on hosts of their own

STUDY = [sys.executable, "-m", "lockstep", "study", "scaling", "--np", "1,2", "--mode", "weak", "--repeats", "1"]
JOB = ["--steps", "3", "--warmup-steps", "1", "--", "digits", "-b", "16", "--device", "cpu"]


def _nodes(folder: Path) -> dict[int, tuple[int, int]]:
    """Nodes and global batch by workers."""
    records = list(read_records(folder / "study" / "scaling.jsonl"))
    assert all(record["communication_alone_seconds"] >= 0 for record in records)
    assert all(record["split_seconds"]["forward"] > 0 for record in records)
    return {record["workers"]: (record["nodes"], record["global_batch"]) for record in records}


def test_a_scaling_study_on_hosts_reached_by_ssh(bed: Bed, tmp_path: Path) -> None:
    hosts = ["-H", "node1:1,node2:1", f"--ssh-option={bed.ssh_options}"]
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        study = bed.start(
            HEAD, [*STUDY, *hosts, *JOB], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    assert study.wait(250) == 0, output.read_text()
    assert "2 workers, global batch 32 (1 on node1, 1 on node2): weak" in output.read_text()
    assert _nodes(tmp_path) == {1: (1, 16), 2: (2, 32)}


def test_a_scaling_study_in_an_allocation_of_slurm(slurm: Slurm, tmp_path: Path) -> None:
    printed = slurm.sbatch(
        f"#!/bin/bash\ncd {tmp_path}\n{' '.join([*STUDY, *JOB])}\n", "--nodes=2", "--ntasks-per-node=1", "--time=10"
    )
    assert "2 measurements, 0 of them already recorded" in printed
    assert _nodes(tmp_path) == {1: (1, 16), 2: (2, 32)}
