"""An elastic script outlives the loss of any worker, and of all, where the launcher restarts its workers."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from commands import LOCKSTEP, own_environment, run

# Steps of SGD by hand: an optimizer would cost each worker seconds of imports.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import horovod.torch as hvd

folder, first = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
hvd.init()
torch.manual_seed(hvd.rank())  # rank 0's weights count
model = torch.nn.Linear(4, 1).double()
torch.nn.init.constant_(model.weight, hvd.rank() + 1.0)
samples = torch.randn(64, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))

@hvd.elastic.run
def train(state):
    while state.step < 10:
        indices = state.sampler.remaining_indices[: 2 * hvd.size()][hvd.rank() :: hvd.size()]
        (slope,) = torch.autograd.grad(model(samples[indices]).square().mean(), model.weight)
        with torch.no_grad():
            model.weight -= 0.1 * hvd.allreduce(slope)
        state.sampler.record_batch(state.step, 2)
        state.sampler.reset()
        state.step += 1
        tell("steps", state.step)
        state.commit()
        if first and state.step == 4 and hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def tell(name, *words):
    if hvd.rank() == 0:
        with (folder / name).open("a") as file:
            print(*words, file=file)

sampler = hvd.elastic.ElasticSampler(samples, seed=3)
model.bias.data.zero_().requires_grad_(False)
state = hvd.elastic.TorchState(model=model, sampler=sampler, step=0)
state.register_reset_callbacks([lambda: tell("resets", state.step, hvd.size())])
train(state)
if hvd.rank() == 0:
    torch.save({"weight": model.weight.detach(), "done": sampler.processed_num}, folder / "result.pt")
"""


def undisturbed() -> torch.Tensor:
    """The weights that the script must find, by one process that knows nothing of elastic training."""
    samples = torch.randn(64, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    order = list(range(64))
    random.Random(3).shuffle(order)
    weight = torch.ones(1, 4, dtype=torch.double)
    for step in range(10):
        batch = samples[order[4 * step : 4 * step + 4]]
        weight -= 0.1 * 2 * (batch @ weight.T * batch).mean(0, keepdim=True)
    return weight


def test_a_script_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    script = [sys.executable, tmp_path / "script.py", tmp_path]
    flags = ("-np", "2", "--max-restarts", "1")
    job = run([*LOCKSTEP, "run", *flags, "--", *script], tmp_path, own_environment(OMP_NUM_THREADS="1"))
    assert job.returncode == 0, job.stderr
    assert "restart 1 of 1, with 2 workers" in job.stderr
    result = torch.load(tmp_path / "result.pt")
    torch.testing.assert_close(result["weight"], undisturbed(), rtol=0, atol=1e-12)
    assert result["done"] == 40
    assert (tmp_path / "steps").read_text().split() == [str(step) for step in range(1, 11)]  # none twice
    assert (tmp_path / "resets").read_text() == "4 2\n"
