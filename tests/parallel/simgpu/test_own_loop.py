"""A loop of one's own on simulated GPUs has the figures of CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import simgpu
import torch
import torch.nn.functional as F
from runs import losses
from simulated_gpu import gpu_world, run_on_gpus
from torch import nn
from torch.utils.data import TensorDataset
from worker_group import run_in_workers

import lockstep.run.balance as balancing
from lockstep.run.connect import TrainingWorld
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")
generator = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(123, 6, generator=generator), torch.randint(0, 3, (123,), generator=generator))


def _train(world: World, folder: Path) -> float:
    """Train two epochs, and return the accuracy."""
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    torch.manual_seed(0)
    model = own.prepare(nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train = own.loader(DATA, global_batch=20, shuffle=True)
    run = own.run(folder, loader=train, log_every=1, model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for inputs, labels in train:
            loss = F.cross_entropy(model(inputs.double()), labels)
            run.backward(loss)
            optimizer.step()
            run.step(loss=loss)
            optimizer.zero_grad()
    run.close()
    model.eval()
    with torch.no_grad():
        test = own.loader(DATA, 16, evaluate=True)
        hits = sum(int((model(inputs.double()).argmax(1) == labels).sum()) for inputs, labels in test)
    return own.sum(hits) / len(DATA)


def _train_on_gpus(_: World, folder: Path) -> float:
    simgpu.delays(seed=1, copy_us=2000, operation_us=10, collective_us=300)
    with gpu_world() as world:
        return _train(world, folder)


def test_a_loop_on_gpus_has_the_figures_of_cpus(tmp_path: Path) -> None:
    on_gpus = run_on_gpus(2, _train_on_gpus, tmp_path / "gpu")
    on_cpus = run_in_workers(3, _train, tmp_path / "cpu")
    assert on_gpus[0] == on_cpus[0]
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-9)


def _balance_on_gpus(world: World, folder: Path) -> list[float]:
    """Train with a slow device on the last rank; return the shares."""
    balancing.MIN_SECONDS = 0.1
    simgpu.delays(seed=1, operation_us=5000 if world.rank else 100)
    with gpu_world() as world:
        own = TrainingWorld(world.rank_info, world.device, world.host_group)
        model = own.prepare(nn.Linear(6, 3).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train = own.loader(DATA, global_batch=12, shuffle=True, balance=True)
        run = own.run(folder, loader=train, model=model, optimizer=optimizer)
        for _ in run.epochs(3):
            for inputs, labels in train:
                optimizer.zero_grad()
                run.backward(_mean_by_sample(model, inputs, labels))
                optimizer.step()
                run.step()
        assert train.sharding is not None
        return list(train.sharding.fractions)


def _mean_by_sample(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss by operations on each sample, so that the time on the device grows with their number."""
    outputs = model(inputs.double())
    return torch.stack([F.cross_entropy(outputs[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]).mean()


def test_shares_follow_the_speeds_of_devices(tmp_path: Path) -> None:
    first, second = run_on_gpus(2, _balance_on_gpus, tmp_path)
    assert first == second
    assert first[0] > 0.6, first
