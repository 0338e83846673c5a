"""A program of its own, with a rank that takes longer in one phase of each step.

Arguments: the strategy, the phase or "none", the slow rank, the seconds, the number of steps, and perhaps the batch.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STRATEGIES = ("ddp", "fsdp", "hvd", "manual")  # the last one averages the gradients itself
PHASES = ("data_wait", "forward", "backward", "optimizer")


def spend(phase: str) -> None:
    if phase == slow_phase and rank == slow_rank:
        time.sleep(seconds)


class SlowData(Dataset[Any]):
    """Endless data; the first image of a batch may take long."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index % (batch * size) < size:
            spend("data_wait")
        return torch.ones(32) * (index % 7), index % 10


class SlowBackward(torch.autograd.Function):
    """Return the input; the backward pass may take long."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        spend("backward")
        return gradients[0]


class SlowNetwork(nn.Module):
    """A network with batch norm, whose buffers DDP broadcasts before the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        spend("forward")
        return self.last(SlowBackward.apply(self.norm(self.first(images)).relu()))


class SlowSGD(torch.optim.SGD):
    """SGD whose step may take long."""

    def step(self, closure: Any = None) -> Any:
        spend("optimizer")
        return super().step(closure)


def parallel(strategy: str, model: nn.Module) -> tuple[nn.Module, Any]:
    """Return the model and its optimizer with a strategy; connect to the other workers."""
    if strategy == "hvd":
        from lockstep import hvd

        hvd.init()
        own = SlowSGD(model.parameters(), 0.01)
        return model, hvd.DistributedOptimizer(own, model.named_parameters())
    dist.init_process_group("gloo")
    if strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=dist.init_device_mesh("cpu", (size,)))
    return model, SlowSGD(model.parameters(), 0.01)


def main() -> None:
    torch.manual_seed(0)
    model, optimizer = parallel(strategy, SlowNetwork())
    data = SlowData()
    sampler: Any = DistributedSampler(data, size, rank, shuffle=False)
    for step, (images, labels) in enumerate(DataLoader(data, batch, sampler=sampler), start=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        for parameter in model.parameters() if strategy == "manual" else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step == steps:
            break
    if strategy != "hvd":
        dist.destroy_process_group()


if __name__ == "__main__":
    strategy, slow_phase = sys.argv[1:3]
    slow_rank, seconds, steps = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    batch = int(sys.argv[6]) if sys.argv[6:] else 8
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    main()
