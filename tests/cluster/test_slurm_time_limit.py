"""What is left of a real Slurm job, as a worker in it learns it."""

from __future__ import annotations

import sys

import pytest
from slurm import Slurm

pytestmark = pytest.mark.cold  # on hosts of their own

ASK = "import os; from lockstep.world.batch_time_left import time_left; print(time_left(os.environ).seconds)"
SCRIPT = f"""#!/bin/sh
echo $(({"${SLURM_JOB_END_TIME:-0}"} - $(date +%s)))
{sys.executable} -c '{ASK}'
"""


def test_a_job_learns_its_time_limit(slurm: Slurm) -> None:
    by_environment, told = map(float, slurm.sbatch(SCRIPT, "--time=0:10:00").split())
    assert 590 < told <= 600
    assert by_environment < 0 or abs(by_environment - told) <= 2  # Slurm 22.05 gives no SLURM_JOB_END_TIME
