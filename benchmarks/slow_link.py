"""How much do strategies, gradient compression and accumulation gain over a slow link, compared with hand-written DDP?

    python benchmarks/slow_link.py [MEGABITS...]

Two workers with one thread each, in network namespaces joined by a link of 1000 and then of 100 Mbit/s each way (needs
root and iproute2). Network: Lockstep's ResNet-18 (11.2 million parameters, 44.7 MB of gradients), with 8 images of
32 x 32 per worker and forward pass, and SGD with momentum. The peer is a loop with torch's DistributedDataParallel; the
others are the trainer's strategies; "4 passes" accumulates four forward passes per step. A turn is one step, measured
per image in wall time; PowerSGD's initial uncompressed steps run before. The bytes are those that a worker passes to
all-reduce per step. Three minutes per link.

Bar: the trainer's ddp and horovod, without compression, take at most 1.05 times as long as hand-written DDP.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness import Bar, Unit, Work, append_record
from limited_link import run_over_limited_link
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import sgd
from workers import compare_in_workers, in_workers

from lockstep.config.schema import ParallelConfig, TrainConfig
from lockstep.models import registry
from lockstep.train.strategies import Strategy, build_strategy
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

ROUNDS = {1000.0: 9, 100.0: 6}  # by Mbit/s
BATCH = 8
DDP, HOROVOD = (ParallelConfig(strategy=name) for name in ("ddp", "horovod"))
POWERSGD, PLAIN_STEPS = "ddp, powersgd rank 4", 2
CONTESTANTS = {
    "ddp": (DDP, 1),
    "ddp, fp16": (ParallelConfig(strategy="ddp", compress="fp16"), 1),
    "ddp, bf16": (ParallelConfig(strategy="ddp", compress="bf16"), 1),
    POWERSGD: (ParallelConfig(strategy="ddp", compress="powersgd"), 1),
    "ddp, 4 passes": (DDP, 4),
    "horovod": (HOROVOD, 1),
    "horovod, fp16": (ParallelConfig(strategy="horovod", compress="fp16"), 1),
    "horovod, bf16": (ParallelConfig(strategy="horovod", compress="bf16"), 1),
    "horovod, 4 passes": (HOROVOD, 4),
}


def resnet18() -> nn.Module:
    torch.manual_seed(0)
    return registry.build("resnet18", num_classes=10, in_channels=3, side=32)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))


def ddp_loop() -> Work:
    model = DistributedDataParallel(resnet18())
    optimizer = sgd(model)
    images, labels = batch()

    def turn() -> int:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return BATCH

    return turn


def training(strategy: Strategy, passes: int) -> Work:
    model = resnet18()
    replica = strategy.wrap(model)
    optimizer = sgd(model)
    images, labels = batch()

    def turn() -> int:
        for number in range(1, passes + 1):
            with strategy.accumulating(is_last=number == passes):
                (F.cross_entropy(replica(images), labels) / passes).backward()
        strategy.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        return BATCH * passes

    return turn


def main(world: World) -> None:
    megabits = float(sys.argv[1])
    strategies: dict[str, Strategy] = {}
    contestants: dict[str, Callable[[], int]] = {"hand-written DDP": ddp_loop()}
    for name, (parallel, passes) in CONTESTANTS.items():
        strategies[name] = build_strategy(TrainConfig(parallel=parallel), world, total_steps=1)
        contestants[name] = training(strategies[name], passes)
    for _ in range(PLAIN_STEPS):
        contestants[POWERSGD]()
    name = f"slow_link: {megabits:g} Mbit/s"
    bars = {"ddp": Bar("at most", 1.05), "horovod": Bar("at most", 1.05)}
    compare_in_workers(world, name, contestants, bars, Unit("ms per image", 1e3), ROUNDS.get(megabits, 6))
    report_bytes(world, name, {name: (strategy, contestants[name]) for name, strategy in strategies.items()})


def report_bytes(world: World, name: str, taken: dict[str, tuple[Strategy, Work]]) -> None:
    """Run one more step of each strategy with compression; print and record the bytes that it sends."""
    savings = {}
    for compressed, (strategy, turn) in taken.items():
        if strategy.traffic.plain_bytes:
            strategy.traffic.take()
            turn()
            traffic = strategy.traffic.take()
            savings[compressed] = {"plain_bytes": traffic.plain_bytes, "sent_bytes": traffic.sent_bytes}
    if world.is_main:
        for compressed, row in savings.items():
            sent, plain = (row[kind] / 1e6 for kind in ("sent_bytes", "plain_bytes"))
            print(f"  {compressed:24}{sent:.2f} MB per step instead of {plain:.2f} MB")
        append_record({"name": f"{name}, bytes per step", "savings": savings})


if __name__ == "__main__":
    if RankInfo.from_environment().launcher == "none":
        os.environ["OMP_NUM_THREADS"] = "1"
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("megabits", type=float, nargs="*", default=list(ROUNDS))
        rates = parser.parse_args().megabits
        sys.exit(max(run_over_limited_link(rate, [sys.argv[0], str(rate)]) for rate in rates))
    in_workers(2, main)
