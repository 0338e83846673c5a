"""Scripts under the launchers: each worker uses its own simulated GPU, and an elastic job outlives a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import HOROVODRUN, LIMIT_SECONDS, LOCKSTEP, own_environment, run, started
from ports import free_port

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


STEPS, LOST_AT = 8, 3

# Generation G loses a worker in a step, given as STEP:LOCAL_RANK on the host with the variable LOSES.
ELASTIC = f"""
import os, signal, sys
from pathlib import Path
import simgpu, torch
from lockstep import hvd

simgpu.install(4)
folder, losses = Path(sys.argv[1]), [each.split(":") for each in sys.argv[2:]]
hvd.init()
device = torch.device("simgpu", int(os.environ.get("FIRST_GPU", "0")) + hvd.local_rank())
torch.accelerator.set_device_index(device.index)
samples = torch.randn({STEPS}, 6, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
model = torch.nn.Linear(4, 1, dtype=torch.double)
torch.nn.init.constant_(model.weight, hvd.rank() + 1.0)  # rank 0's weights count
torch.nn.init.zeros_(model.bias)
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
simgpu.delays(seed=hvd.rank(), operation_us=500, collective_us=5000)

@hvd.elastic.run
def train(state):
    while state.step < {STEPS}:
        optimizer.zero_grad()
        loss = model(samples[state.step, hvd.rank() :: hvd.size()].to(device)).square().mean()
        generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        here = [str(state.step), os.environ["HOROVOD_LOCAL_RANK"]]
        is_lost = "LOSES" in os.environ and losses[generation : generation + 1] == [here]
        if is_lost:
            simgpu.delays(collective_us=600_000_000)  # the other's GPU waits for this one's
        loss.backward()
        optimizer.step()
        if is_lost:
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        state.commit()

state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
state.register_reset_callbacks([lambda: (folder / "resets").write_text(f"{{state.step}} {{hvd.size()}}")])
train(state)
result = {{"weight": model.weight.detach().cpu(), "contexts": simgpu.contexts()}}
torch.save(result, folder / f"{{hvd.rank()}}.pt")
"""


def _undisturbed() -> torch.Tensor:
    """Return the weights after the same steps of one process, on the CPU."""
    samples = torch.randn(STEPS, 6, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Linear(4, 1, dtype=torch.double)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in samples:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model.weight.detach()


def test_a_lost_worker_is_replaced_and_no_step_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker's GPU waits for the lost one; its context is unusable after the abort."""
    monkeypatch.setenv("SIMGPU_POISON", "0")
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setenv("LOSES", "")
    (tmp_path / "script.py").write_text(ELASTIC)
    flags = ("-np", "2", "--min-np", "2", "--host-discovery-script", "echo localhost:2")
    script = [sys.executable, tmp_path / "script.py", tmp_path, f"{LOST_AT}:1"]
    job = run([*HOROVODRUN, *flags, *script], tmp_path)
    assert job.returncode == 0, job.stderr
    assert "continuing from the last commit of a worker that was replaced, too" in job.stderr
    assert (tmp_path / "resets").read_text() == f"{LOST_AT} 2"
    assert sorted(_contexts_after_the_same_training(tmp_path, 2)) == [{0}, {1}]


def _contexts_after_the_same_training(folder: Path, workers: int) -> list[set[int]]:
    results = [torch.load(folder / f"{rank}.pt") for rank in range(workers)]
    for result in results:
        torch.testing.assert_close(result["weight"], _undisturbed(), rtol=0, atol=1e-12)
    return [result["contexts"] for result in results]


def test_commits_of_workers_on_two_hosts_outlive_their_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborts spoil the GPUs with local rank 0: first one of two survivors, alone on its host, and then both."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setenv("SIMGPU_POISON", "0")
    (tmp_path / "script.py").write_text(ELASTIC)
    manual = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--max-restarts", "2"]
    script = [sys.executable, "script.py", tmp_path, f"{LOST_AT}:0", f"{LOST_AT + 2}:1"]

    def node(number: int, workers: int) -> list[str | Path]:
        return [*LOCKSTEP, "run", *manual, "--node-rank", str(number), "-np", str(workers), "--", *script]

    with started(node(1, 2), tmp_path, own_environment(LOSES="", FIRST_GPU="2")) as other:
        job = run(node(0, 1), tmp_path)
        assert (job.returncode, other.wait(LIMIT_SECONDS)) == (0, 0), job.stderr + other.text
    restarts = [line for line in job.stderr.splitlines() if line.startswith("lockstep: restart")]
    assert restarts[0].startswith("lockstep: restart 1 of 2, with 3 workers, of which 1 stays")
    assert restarts[1].startswith("lockstep: restart 2 of 2, with 3 workers: ")
    assert job.stderr.count("is replaced, too: its simgpu device cannot be used after the loss of another") == 3
    assert job.stderr.count("continuing from the last commit of a worker that was replaced, too") == 1
    assert (tmp_path / "resets").read_text() == f"{LOST_AT + 2} 3"
    assert sorted(_contexts_after_the_same_training(tmp_path, 3), key=min) == [{0}, {2}, {3}]


TRAINING = """
import os, signal, sys
import psutil, simgpu, torch
simgpu.install()
import lockstep.train.loop as loop
from lockstep.cli import main

folder, lost_at, data = sys.argv[1], [int(step) for step in sys.argv[2].split(",")], sys.argv[3:]
take_step, memory, loaders, generations = loop.take_step, [], [], set()

def losing(job, batch, position):
    step, generation = job.progress.step, os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "1" and int(generation) < len(lost_at) and step >= lost_at[int(generation)]:
        os.kill(os.getpid(), signal.SIGKILL)
    if generation not in generations:
        generations.add(generation)
        torch.accelerator.synchronize()
        memory.append(torch.get_device_module("simgpu").memory_allocated())
        loaders.append({each.pid for each in psutil.Process().children()})
    take_step(job, batch, position)

loop.take_step = losing
flags = ["-b", "20", "--epochs", "2", "--io-every", "0", "--track", "--log-every", "4", "--device", "gpu"]
code = main(["train", *data, "--run-dir", folder, *flags])
if os.environ["RANK"] == "0":
    torch.save((memory, loaders, simgpu.counts()["groups aborted"], simgpu.contexts()), folder + ".pt")
sys.exit(code)
"""


NET = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2))
"""


@pytest.mark.parametrize(
    ("loading", "losses", "abort_ms"),
    [(False, 2, 3500), pytest.param(True, 2, 3500, marks=pytest.mark.long),
     pytest.param(False, 20, 0, marks=pytest.mark.long),
     pytest.param(False, 10, 12_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)  # fmt: skip
def test_training_keeps_a_process_whose_gpu_waited(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_folder: Callable[..., Path],
    loading: bool,
    losses: int,
    abort_ms: int,
) -> None:
    """Workers are lost in turn, while the GPU of the other waits for them, and loader processes pin its memory."""
    monkeypatch.setenv("SIMGPU_ABORT_MS", str(abort_ms))  # NCCL's may take longer than a new group
    data = ["digits", "--max-steps", str(10 + 3 * losses)]
    if loading:
        (tmp_path / "net.py").write_text(NET)
        data = [str(new_folder(train=150)), "-a", "net:build", "--in-memory", "never", "--workers", "1"]
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    (tmp_path / "script.py").write_text(TRAINING)
    for name, lost_at in (("calm", "99"), ("struck", ",".join(str(7 + 3 * loss) for loss in range(losses)))):
        flags = ("-np", "2", "--max-restarts", str(losses))
        command = [*LOCKSTEP, "run", *flags, "--", sys.executable, "script.py", name, lost_at, *data]
        job = run(command, tmp_path, timeout=LIMIT_SECONDS + 2 * losses * abort_ms / 1000)
        assert job.returncode == 0, job.stderr
        assert "Traceback" not in job.stderr
    assert job.stderr.count("with 2 workers, of which 1 stays") == losses
    memory, loaders, aborted, contexts = torch.load(tmp_path / "struck.pt")
    assert (aborted, contexts) == (losses, {0})
    assert len(set(memory[1:])) == 1, "each later generation starts with the same state on the GPU"
    assert all(loaders) or not loading
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("calm", "struck")]
    assert weights[0] == weights[1]


def test_worker_with_a_spoiled_gpu_is_replaced_with_the_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort after a loss leaves the context of rank 0 unusable, as NCCL's may."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setenv("SIMGPU_POISON", "0")
    (tmp_path / "script.py").write_text(TRAINING)
    command = [*LOCKSTEP, "run", "-np", "2", "--max-restarts", "1", "--", sys.executable, "script.py"]
    job = run([*command, "struck", "7", "digits", "--max-steps", "12"], tmp_path)
    assert job.returncode == 0, job.stderr
    assert "Traceback" not in job.stderr
    assert "is replaced, too: its simgpu device cannot be used after the loss of another" in job.stderr
    assert "worker 1 of 2 was ended by SIGKILL" in job.stderr
    assert "lockstep: restart 1 of 1, with 2 workers\n" in job.stderr
