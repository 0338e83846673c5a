"""How much slower is a training step with hvd.DistributedOptimizer than with DistributedDataParallel?

    python benchmarks/hvd_training.py

Two workers on this machine, one thread each, Gloo on loopback. Networks: ResNet-18 at batch 8 with images of 224 x 224
and of 64 x 64, the latter also with gradients sent as float16 (DDP with its fp16 hook), and a network of 64 small
layers, also with three figures that are averaged one by one after each step, as in Horovod's tutorials; SGD with
momentum. A turn is a few steps. Bars, by wall time: at most 1.02 times DDP's step for ResNet-18, 1.08 times for the
small layers, and 1.15 times with the figures. (Horovod 0.28 on such a machine: 1.20 at 224 x 224, 1.29 at 64 x 64.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Bar, Unit, Work
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18
from work import sgd
from workers import compare_in_workers, in_workers

from lockstep import hvd
from lockstep.world.world import World

BATCH, ROUNDS = 8, 15


Average = Callable[[float, str], float]  # the mean of a number over the workers, by the number's name


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    steps: int,
    average: Average,
    figures: Sequence[str],
) -> Work:
    labels = torch.randint(0, 1000, (len(images),))

    def turn() -> int:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            for name in figures:
                average(loss.item(), name)
        return steps

    return turn


def by_torch(value: float, name: str) -> float:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).item()


def by_hvd(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name).item())


def small_layers() -> nn.Module:
    layers = [layer for _ in range(63) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 64), *layers, nn.Linear(64, 1000))


COMPRESSIONS = {
    "none": (hvd.Compression.none, None),
    "fp16": (hvd.Compression.fp16, fp16_compress_hook),
}


def case(
    world: World,
    name: str,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    steps: int,
    compression: str = "none",
    figures: Sequence[str] = (),
    limit: float = 1.02,
) -> None:
    torch.manual_seed(0)
    compressor, hook = COMPRESSIONS[compression]
    ours = build()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    if hook is not None:
        theirs.register_comm_hook(None, hook)
    images = torch.randn(BATCH, *shape)
    optimizer = hvd.DistributedOptimizer(sgd(ours), ours.named_parameters(), compression=compressor)
    contestants = {
        "DDP": training(theirs, sgd(theirs), images, steps, by_torch, figures),
        "hvd.DistributedOptimizer": training(ours, optimizer, images, steps, by_hvd, figures),
    }
    bars = {"hvd.DistributedOptimizer": Bar("at most", limit)}
    compare_in_workers(world, f"hvd_training: {name}", contestants, bars, Unit("ms per step", 1e3), ROUNDS)


def main(world: World) -> None:
    hvd.init()
    case(world, "ResNet-18, 224 x 224", resnet18, (3, 224, 224), 3)
    case(world, "ResNet-18, 64 x 64", resnet18, (3, 64, 64), 10)
    case(world, "ResNet-18, 64 x 64, fp16", resnet18, (3, 64, 64), 10, "fp16")
    case(world, "64 small layers", small_layers, (3, 8, 8), 100, limit=1.08)
    figures = ("loss", "accuracy", "top-5")
    case(world, "64 small layers, 3 figures", small_layers, (3, 8, 8), 100, figures=figures, limit=1.15)
    hvd.shutdown()


if __name__ == "__main__":
    in_workers(2, main)
