"""Loops of one's own whose GPU waits for a lost worker: they begin again in their process, from the newest snapshot."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from commands import LOCKSTEP, run

from lockstep.files.jsonl import read_records

pytestmark = pytest.mark.usefixtures("simulated_gpu")
TESTS = Path(__file__).parents[2]

# In generation G, rank G % size is lost, while the GPUs of the others wait for it: before a step, or when its host is
# ahead of its GPU. Rank 0 notes digests of the workers' weights after each step; they are equal, unless sharded.
LOOP = """
import hashlib, os, signal, sys
from pathlib import Path
import simgpu, torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

simgpu.install(3)
import lockstep
from lockstep import hvd

kind, folder, epochs, lost_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), [*map(int, sys.argv[4].split(","))]
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(72, 6, generator=generator), torch.randint(0, 3, (72,), generator=generator))

def digest(model):
    parts = [each.to_local() if kind == "fsdp2" else each for each in model.state_dict().values()]
    return hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in parts)).hexdigest()

def main():
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if kind == "hvd":
        hvd.init()
    world = lockstep.connect()
    assert world.device.type == "simgpu"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.1), nn.Linear(9, 3)).to(world.device)
    if kind == "ddp":
        model = world.prepare(net)
    else:
        model = fully_shard(net) if kind == "fsdp2" else net
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if kind == "hvd":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    train = world.loader(data, global_batch=12, shuffle=True)
    run = world.run(folder / "run", loader=train, log_every=2, checkpoint_epochs=0, model=model, optimizer=optimizer)
    with open(folder / f"pids.{generation}.{world.rank}", "w") as file:
        file.write(f"{os.getpid()} {torch.get_device_module('simgpu').memory_allocated()} {simgpu.contexts()}")
    for _ in run.epochs(epochs):
        for inputs, labels in train:
            is_next = generation < len(lost_at) and run.step_count >= lost_at[generation]
            is_lost = is_next and world.rank == generation % world.size
            if is_lost and generation % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if is_lost:
                simgpu.delays(collective_us=600_000_000)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            run.backward(loss)
            optimizer.step()
            if is_lost:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(loss=loss)
            found = world.gather(digest(model))
            assert kind == "fsdp2" or len({*found}) == 1, "the weights are not equal on all workers"
            if world.is_main:
                with open(folder / "digests", "a") as file:
                    print(run.step_count, *found, file=file)
    world.barrier()

lockstep.survive(main)
"""


def _digests(folder: Path) -> set[str]:
    return {*(folder / "digests").read_text().splitlines()}


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long), "hvd"])
@pytest.mark.parametrize(
    ("workers", "losses"),
    [(2, 1), pytest.param(2, 20, marks=pytest.mark.long), pytest.param(3, 20, marks=pytest.mark.long)],
)
@pytest.mark.timeout(900)
def test_own_loop_keeps_a_process_whose_gpu_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, workers: int, losses: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    (tmp_path / "loop.py").write_text(LOOP)
    lost_at = [5 + 3 * loss for loss in range(losses)]
    epochs = -(-lost_at[-1] // 6) + 1
    for name, steps in (("calm", [10_000]), ("struck", lost_at)):
        (tmp_path / name).mkdir()
        program = [sys.executable, "loop.py", kind, tmp_path / name, str(epochs), ",".join(map(str, steps))]
        flags = ("-np", str(workers), "--max-restarts", str(losses))
        job = run([*LOCKSTEP, "run", *flags, "--", *program], tmp_path)
        assert job.returncode == 0, job.stderr
    stay = f"with {workers} workers, of which {workers - 1} stay{'s' if workers == 2 else ''}"
    assert job.stderr.count(stay) == losses, job.stderr
    assert _digests(tmp_path / "struck") == _digests(tmp_path / "calm")
    generations = [each for each in read_records(tmp_path / "struck/run/metrics.jsonl") if each["kind"] == "generation"]
    assert [each["number"] for each in generations] == [*range(1, losses + 1)]
    assert all(each["repeated_steps"] <= 4 for each in generations)  # two, if the newest snapshot was complete
    _check_processes(tmp_path / "struck", workers, losses)


def _check_processes(folder: Path, workers: int, losses: int) -> None:
    """Each process has one context, and starts each generation but its first with as much memory in use."""
    found: dict[str, list[str]] = {}
    for generation in range(losses + 1):
        for rank in range(workers):
            pid, memory, context = (folder / f"pids.{generation}.{rank}").read_text().split(maxsplit=2)
            assert context.count(",") == 0, context
            found.setdefault(pid, []).append(memory)
    assert len(found) == workers + losses
    assert all(len({*memory[1:]}) <= 1 for memory in found.values()), found
