"""A job on several hosts outlives the loss of one, and takes it back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hosts import Bed
from safetensors.torch import load_file
from ssh_job import Job

from lockstep.files.jsonl import read_records

pytestmark = pytest.mark.cold  # on hosts of their own

NET = """\
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, num_classes))
"""


def _train(folder: Path, run: Path) -> list[str]:
    (folder / "net.py").write_text(NET)
    # One thread a worker on each host, as on one machine; the hosts do not know that they share its cores.
    train = ["env", f"PYTHONPATH={folder}", "OMP_NUM_THREADS=1", sys.executable, "-m", "lockstep", "train", "digits"]
    train += ["-a", "net:build", "-b", "20", "--epochs", "10", "--precision", "fp64", "--checkpoint-epochs", "0"]
    return [*train, "-p", "4", "--io-every", "0", "--track", "--run-dir", str(run)]


def _steps(run: Path, kind: str) -> list[int]:
    path = run / "metrics.jsonl"
    return [each["step"] for each in read_records(path) if each["kind"] == kind] if path.exists() else []


def test_training_goes_on_without_a_lost_host_and_takes_it_back(bed: Bed, tmp_path: Path) -> None:
    struck, calm = tmp_path / "struck", tmp_path / "calm"
    elastic = ["-H", "node1:1,node2:2", f"--ssh-option={bed.ssh_options}", "--max-restarts", "2", "--min-np", "1"]
    elastic += ["--start-timeout", "120"]
    with Job(bed, tmp_path / "job", direct=[*_train(tmp_path, struck), *elastic]) as job:
        job.wait_until(lambda: max(_steps(struck, "step"), default=0) >= 12, 120)
        bed.link_down("node2")
        job.wait_until(lambda: len(_steps(struck, "run")) == 2, 120)
        bed.link_up("node2")
        assert job.wait(240) == 0, job.stderr
        assert job.seconds_to_end(10) >= 0
    assert "lost node2" in job.stderr
    assert "restart 1 of 2, with 1 worker: 1 on node1" in job.stderr
    assert "lost node1" not in job.stderr  # its node process goes on alone
    assert job.files_left() == []
    here = bed.at("head", [*_train(tmp_path, calm), "-np", "3"])
    subprocess.run(here, cwd=tmp_path, env=bed.environment(), capture_output=True, timeout=120, check=True)
    steps = _steps(struck, "step")
    assert steps == sorted(set(steps))  # each once, with one more where the job stopped to take the host back
    assert {*steps} >= {*_steps(calm, "step")}
    assert _steps(struck, "epoch") == _steps(calm, "epoch")
    weights, expected = (load_file(run / "model.safetensors") for run in (struck, calm))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-9)
