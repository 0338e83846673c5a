"""A hang on two hosts: the launcher asks both, and names the host of the rank that is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hosts import Bed
from ssh_job import Job

from lockstep.errors import HangError

pytestmark = pytest.mark.cold  # on hosts of their own

HANGING = Path(__file__).parents[1] / "support/hanging.py"


@pytest.mark.parametrize(("engine", "kind"), [("ddp", "stop"), pytest.param("hvd", "data", marks=pytest.mark.long)])
def test_the_rank_and_its_host_are_named(bed: Bed, tmp_path: Path, engine: str, kind: str) -> None:
    command = [sys.executable, str(HANGING), engine, kind, "1"]
    options = ["--hang-timeout", "5"]
    with Job(bed, tmp_path, command=command, hosts="node1:1,node2:1", options=options) as job:
        code = job.wait(90)
    assert code == HangError.exit_code, job.stderr
    assert re.search(r"^lockstep: rank 1 \(host node2\) has not entered ", job.stderr, re.MULTILINE)
    assert job.stderr.rstrip().endswith("lockstep: the job hung; all workers were stopped")
    assert not job.survivors()
