"""The Slurm bed itself: it runs steps and batch scripts on two nodes, and its end takes all processes along."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from slurm import Slurm, slurm_cluster, why_not

pytestmark = pytest.mark.cold  # on hosts of their own


def test_it_runs_steps_and_batch_scripts(slurm: Slurm) -> None:
    assert sorted(slurm.run(["srun", "-N2", "-n3", "hostname"]).stdout.split()) == ["hal01", "hal01", "hal02"]
    assert slurm.sbatch("#!/bin/sh\nhostname\nsrun hostname\n", "-N2").split()[0] == "hal01"
    slurm.wait_until_idle()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_its_end_leaves_no_process_behind(tmp_path: Path) -> None:
    before = set(psutil.pids())
    with slurm_cluster(tmp_path) as slurm:
        slurm.sbatch("#!/bin/sh\nsetsid sleep 1000 > /dev/null 2>&1 &\nsleep 0.1\n")
        assert {"slurmctld", "slurmd", "munged"} <= names(before)
    assert not {"slurmctld", "slurmd", "munged", "sleep 1000"} & names(before)


def names(before: set[int]) -> set[str]:
    """Of the processes since then, some of which other tests may have started: programs, and a call of sleep whole."""
    found = [process.info for process in psutil.process_iter(["pid", "name", "cmdline"])]
    new = [each for each in found if each["pid"] not in before]
    return {" ".join(each["cmdline"] or ()) if each["name"] == "sleep" else each["name"] for each in new}
