"""`lockstep doctor` tries the simulated GPUs of a machine together."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from commands import of_one_thread, run, write_shims
from simulated_gpu import run_on_gpus

from lockstep.launch.gpus_doctor import Trial, reduce_together
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")
TESTS = Path(__file__).parents[2]

DOCTOR = """
import sys
from functools import partial
import simgpu
simgpu.install(devices=2)
from lockstep.cli import main
from lockstep.launch import gpus_doctor
from lockstep.world import accelerator
accelerator.WITHOUT_DIRECT_ACCESS["simccl"] = accelerator.WITHOUT_DIRECT_ACCESS["nccl"]
gpus_doctor.try_gpus = partial(gpus_doctor.try_gpus, ("shims/python", "worker.py"))
sys.exit(main(["doctor"]))
"""
WORKER = """
import os, simgpu
simgpu.install(devices=2)
from lockstep.launch import gpus_doctor
limit_seconds = gpus_doctor.LIMIT_SECONDS
if os.environ.get("NCCL_P2P_DISABLE") != "1":
    limit_seconds = 2.0
    simgpu.delays(collective_us=600_000_000)
gpus_doctor.main(gpus_doctor.Trial(4000, 0.1, limit_seconds))
"""


def test_gpus_that_hang_together_get_the_fix(tmp_path: Path) -> None:
    (tmp_path / "doctor.py").write_text(DOCTOR)
    (tmp_path / "worker.py").write_text(WORKER)
    write_shims(tmp_path / "shims", "python")
    done = run([sys.executable, "doctor.py"], tmp_path, of_one_thread(PYTHONPATH=str(TESTS)))
    assert done.returncode == 1, done.stderr
    assert "GPUs together: no answer within 2 s; works with NCCL_P2P_DISABLE=1: set it" in done.stdout
    assert done.stderr == ""


def _try(world: World, folder: Path) -> tuple[str, str]:
    store = dist.FileStore(str(folder / "store"), world.size)
    return reduce_together(store, world.rank, world.size, Trial(4000, 0.1))


def test_trial_of_good_gpus_reports_their_rate(tmp_path: Path) -> None:
    results = run_on_gpus(2, _try, tmp_path)
    assert [error for _, error in results] == ["", ""]
    assert all(re.fullmatch(r"2 GPUs, all-reduce at \d+\.\d GB/s or more", found) for found, _ in results)
