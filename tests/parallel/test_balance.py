"""Workers of different speeds: with balancing, shares follow the speeds, and the results stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import NETS, losses, small_digits
from torch import nn
from torch.utils.data import Dataset
from worker_group import run_in_workers

from lockstep.files.jsonl import read_records
from lockstep.run.connect import TrainingWorld
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world import step_clock
from lockstep.world.world import World

SAMPLES, GLOBAL_BATCH, EPOCHS = 240, 24, 6
SLOW, FAST = 0.4, 0.1  # simulated seconds a sample


class SimulatedTime:
    """Takes the place of `time` in the clocks of steps, so that how busy this machine is does not count."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        return self._now

    def spend(self, seconds: float) -> None:
        self._now += seconds


simulated = SimulatedTime()


class SlowImages(Dataset[Any]):
    """Noisy images, each of which takes a worker some simulated time to read."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.classes = ["even", "odd"]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        simulated.spend(self.seconds)
        return torch.randn(1, 4, 4, dtype=torch.float64) + index % 2, index % 2


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def _own_loop(world: World, folder: Path, balance: bool, options: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Train with the last worker slow, then the first; return this worker's samples in each step, and the weights."""
    step_clock.time = simulated  # type: ignore[assignment]
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    data, shares = SlowImages(0.0), []
    model = own.prepare(_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = own.loader(data, global_batch=GLOBAL_BATCH, shuffle=True, balance=balance, **options)
    run = own.run(folder, loader=train, log_every=1, model=model, optimizer=optimizer)
    for epoch in run.epochs(EPOCHS):
        slow = world.size - 1 if epoch < EPOCHS // 2 else 0
        seconds = (SLOW if world.rank == slow else FAST) * balance
        data.seconds = 0.0 if train.prefetches else seconds
        shares.append(0)
        for images, labels in train:
            shares[-1] += train.samples
            simulated.spend(seconds * len(images))
            loss = F.cross_entropy(model(images), labels)
            run.backward(loss)
            if train.completes_step:
                optimizer.step()
                run.step(loss=loss)
                optimizer.zero_grad()
                shares.append(0)
        shares.pop()
    run.close()
    return shares, nn.utils.parameters_to_vector(model.parameters()).tolist()


def _check_shares(shares: list[list[int]]) -> None:
    """Check that every step has all samples, and that the slow worker has fewer soon after it became slow."""
    assert {sum(step) for step in zip(*shares, strict=True)} == {GLOBAL_BATCH}
    steps = SAMPLES // GLOBAL_BATCH
    for end, slow in ((EPOCHS // 2, len(shares) - 1), (EPOCHS, 0)):
        last = [worker[end * steps - 1] for worker in shares]
        assert last.index(min(last)) == slow, shares
        assert min(last) < GLOBAL_BATCH // len(shares) - 1


@pytest.mark.parametrize(
    ("size", "options"),
    [(3, {"accumulate": 2}), (2, {"num_workers": 1})],
    ids=["accumulated", "processes"],
)
def test_shares_of_an_own_loop_follow_the_speeds(size: int, options: dict[str, Any], tmp_path: Path) -> None:
    balanced = run_in_workers(size, _own_loop, tmp_path / "balanced", True, options)
    even = run_in_workers(size, _own_loop, tmp_path / "even", False, options)
    _check_shares([shares for shares, _ in balanced])
    assert balanced[0][1] == pytest.approx(even[0][1], rel=1e-9)
    if "accumulate" not in options:  # else the recorded loss is that of the step's last batches
        assert losses(tmp_path / "balanced") == pytest.approx(losses(tmp_path / "even"), rel=1e-9)
    cuts = [each for each in read_records(tmp_path / "balanced/metrics.jsonl") if each["kind"] == "balance"]
    assert len(cuts) >= 2
    assert all(sum(cut["samples"]) == GLOBAL_BATCH for cut in cuts)


def _train(world: World, folder: Path, net: str, balance: bool, settings: dict[str, Any]) -> None:
    """Run the trainer with its last worker slow in the forward pass."""
    step_clock.time = simulated  # type: ignore[assignment]
    seconds = SLOW if world.rank == world.size - 1 else FAST
    model = NETS[net]()
    if balance:
        model.register_forward_pre_hook(
            lambda module, given: simulated.spend(seconds * len(given[0]) * module.training)
        )
    data = small_digits(SAMPLES, 24)
    options = {"epochs": 3, "global_batch_size": GLOBAL_BATCH, "lr": 0.1, "lr_scaling": "none", "precision": "fp64"}
    common = {"run_dir": folder, "log_every": 5, "track": (), "balance": balance}
    run_with(configure(**options, **common, **settings), world, data, model)


@pytest.mark.parametrize(
    ("size", "net", "settings"),
    [
        (3, "normed", {"sync_bn": True}),
        (2, "plain", {"accumulate": 2, "strategy": "horovod"}),
    ],
    ids=["ddp", "horovod"],
)
def test_shares_of_the_trainer_follow_the_speeds(size: int, net: str, settings: dict[str, Any], tmp_path: Path) -> None:
    for balance in (True, False):
        run_in_workers(size, _train, tmp_path / str(balance), net, balance, settings)
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-9)
    cuts = [each["samples"] for each in read_records(tmp_path / "True/metrics.jsonl") if each["kind"] == "balance"]
    assert cuts[-1][-1] < 0.8 * GLOBAL_BATCH / size, cuts
    assert not [each for each in read_records(tmp_path / "False/metrics.jsonl") if each["kind"] == "balance"]
