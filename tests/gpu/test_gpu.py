"""The GPU suite's checks, on the GPU if there is one, else in the long form on the CPU.

`tests/parallel/simgpu/test_suite.py` runs them on the simulated GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUITE = Path(__file__).parents[2] / "benchmarks" / "gpu"
ON_GPU = torch.cuda.is_available()
JOBS = (
    [["alone"], ["own"], ["shared"], ["trainer"], ["shared-nccl"], ["commands"]]
    if ON_GPU
    else [pytest.param(["alone", "workers"], marks=pytest.mark.long)]
)


@pytest.mark.cold
@pytest.mark.parametrize("jobs", JOBS, ids="+".join)
def test_checks_pass(jobs: list[str], tmp_path: Path) -> None:
    device = "cuda" if ON_GPU else "cpu"
    words = ["check", "--only", *jobs, "--device", device, "--out", str(tmp_path), "--minutes", "4.5"]
    done = subprocess.run([sys.executable, str(SUITE), *words], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout, done.stdout
    assert "passed" in done.stdout or "refused" in done.stdout, done.stdout
