"""An elastic script outlives the loss of any worker, and of all, where the launcher starts its workers anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import horovod.torch as hvd

folder, dies = Path(sys.argv[1]), sys.argv[2] == "dies"
first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
hvd.init()
torch.manual_seed(hvd.rank())  # rank 0's weights count
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
samples = list(torch.randn(64, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1)))

@hvd.elastic.run
def train(state):
    done = state.sampler.processed_num
    while state.step < 10:
        indices = state.sampler.remaining_indices[: 2 * hvd.size()][hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        torch.stack([model(samples[index]).square() for index in indices]).mean().backward()
        optimizer.step()
        state.sampler.record_batch(state.step, 2)
        state.sampler.reset()
        state.step += 1
        state.trace(state.step)
        state.commit()
        if dies and first and state.step == 4 and hvd.rank() == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

def trace(step):
    if hvd.rank() == 0:
        with (folder / "steps").open("a") as file:
            print(step, file=file)

def reset():
    if hvd.rank() == 0:
        with (folder / "resets").open("a") as file:
            print(state.step, hvd.size(), file=file)

sampler = hvd.elastic.ElasticSampler(samples, seed=3)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, step=0, trace=trace)
state.register_reset_callbacks([reset])
train(state)
if hvd.rank() == 0:
    torch.save({"model": model.state_dict(), "done": sampler.processed_num}, folder / "result.pt")
"""


def run(folder: Path, *how: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "run", "-np", "2", "--max-restarts", "1", "--"]
    command += [sys.executable, str(folder / "script.py"), str(folder), *how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_a_script_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    import torch

    assert run(tmp_path / "calm", "lives").returncode == 0
    struck = run(tmp_path / "struck", "dies", "0")
    assert struck.returncode == 0, struck.stderr
    assert "restart 1 of 1, with 2 workers" in struck.stderr
    calm, struck_result = (torch.load(tmp_path / name / "result.pt") for name in ("calm", "struck"))
    assert struck_result["done"] == calm["done"] == 40
    for name, weights in calm["model"].items():
        assert torch.equal(struck_result["model"][name], weights)
    steps = [int(step) for step in (tmp_path / "struck" / "steps").read_text().split()]
    assert sorted(set(steps)) == list(range(1, 11))
    assert len(steps) <= 11  # a worker may have been lost before it had written its commit
    assert (tmp_path / "struck" / "resets").read_text() in ("4 2\n", "3 2\n")
    assert not (tmp_path / "calm" / "resets").exists()
