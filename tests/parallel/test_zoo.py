"""Every model of the zoo takes real steps on two workers, whose replicas must stay equal to the bit."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker_group import run_in_workers

from lockstep.models import registry
from lockstep.models.registry import ZOO
from lockstep.train.strategies.ddp import settle_buckets
from lockstep.world.world import World

LARGE = ["resnet101", "dpn92"]
STEPS, IMAGES = 2, 2


def _digest(model: nn.Module) -> str:
    with torch.no_grad():
        weights = [parameter.contiguous().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


def _train(world: World, name: str, precision: str) -> tuple[str, str]:
    """Two steps on images of the worker's own; digests of the weights before and after."""
    entry = ZOO[name]
    torch.manual_seed(world.rank)  # DDP takes rank 0's weights
    model = registry.build(name, 10, entry.in_channels, entry.side).to(memory_format=torch.channels_last)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    settle_buckets(replica)  # as the strategy ddp does
    before = _digest(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        images = torch.randn(IMAGES, entry.in_channels, entry.side, entry.side)
        labels = torch.randint(10, (IMAGES,))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(replica(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, _digest(model)


def _train_all(world: World, names: list[str]) -> dict[str, tuple[str, str]]:
    return {f"{name} in {precision}": _train(world, name, precision) for name in names for precision in ("O0", "bf16")}


def _check(names: list[str]) -> None:
    first, second = run_in_workers(2, _train_all, names)
    assert len(first) == 2 * len(names)
    assert first == second
    assert all(before != after for before, after in first.values())


@pytest.mark.parametrize("half", [0, 1])  # some 15 s each, and a job has 120
def test_two_workers_keep_equal_replicas_of_every_model(half: int) -> None:
    _check([name for name in ZOO if name not in LARGE][half::2])


@pytest.mark.long
def test_two_workers_keep_equal_replicas_of_the_largest_models() -> None:
    _check(LARGE)
