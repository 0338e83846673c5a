"""A DDP script of its own under `lockstep run`: each worker uses its own simulated GPU, and ends with code 0."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from commands import LOCKSTEP, run

pytestmark = pytest.mark.usefixtures("simulated_gpu")
TESTS = Path(__file__).parents[2]

SCRIPT = """
import os, sys
from pathlib import Path
import simgpu, torch
import torch.distributed as dist

simgpu.install()
rank, device = int(os.environ["RANK"]), torch.device("simgpu", int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device.index)
dist.init_process_group("simccl", device_id=device)
torch.manual_seed(rank)  # DDP broadcasts rank 0's weights
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
samples = torch.arange(80.0).view(5, 2, 2, 4) / 80
for batch in samples:
    optimizer.zero_grad()
    model(batch[rank].to(device)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
torch.save((model.module.weight.cpu(), simgpu.contexts()), Path(sys.argv[1]) / f"{rank}.pt")
"""


def _trained_alone() -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.arange(80.0).view(5, 4, 4) / 80:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model.weight


def test_each_worker_of_a_script_uses_its_own_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    (tmp_path / "script.py").write_text(SCRIPT)
    job = run([*LOCKSTEP, "run", "-np", "2", "--", sys.executable, "script.py", tmp_path], tmp_path)
    assert job.returncode == 0, job.stderr
    assert "Traceback" not in job.stderr
    (first, own), (second, other) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert (own, other) == ({0}, {1})
    assert torch.equal(first, second)
    torch.testing.assert_close(first, _trained_alone())
