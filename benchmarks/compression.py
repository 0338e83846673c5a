"""What does gradient compression gain over a slow link?

    python benchmarks/compression.py [MEGABITS]

Two workers with one thread each, in network namespaces that a link of 100 Mbit/s each way joins (needs root and
iproute2); the zoo's ResNet-18 (11.2 million parameters, 44.7 MB of gradients), 8 images of 32 x 32 a worker, SGD with
momentum. A turn is two steps, by wall clock, and the first turn of each, in which PowerSGD starts, does not count. The
bytes are what a worker hands to all-reduce in a step.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F
from harness import Unit, Work, append_record
from limited_link import run_over_limited_link
from workers import compare_in_workers, in_workers

from lockstep.config import ParallelConfig, TrainConfig
from lockstep.models import registry
from lockstep.place import Place
from lockstep.train.strategies import Strategy, build_strategy
from lockstep.world import World

MEGABITS = 100.0
BATCH, STEPS, ROUNDS = 8, 2, 7
LINK = "LOCKSTEP_BENCHMARK_MEGABITS"
CONTESTANTS = {
    "ddp": ParallelConfig(strategy="ddp"),
    "ddp, fp16": ParallelConfig(strategy="ddp", compress="fp16"),
    "ddp, bf16": ParallelConfig(strategy="ddp", compress="bf16"),
    "ddp, powersgd rank 4": ParallelConfig(strategy="ddp", compress="powersgd"),
    "horovod": ParallelConfig(strategy="horovod"),
    "horovod, fp16": ParallelConfig(strategy="horovod", compress="fp16"),
}


def training(strategy: Strategy) -> Work:
    torch.manual_seed(0)
    model = registry.build("resnet18", num_classes=10, in_channels=3, side=32)
    replica = strategy.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def turn() -> int:
        for _ in range(STEPS):
            with strategy.accumulating(is_last=True):
                F.cross_entropy(replica(images), labels).backward()
            strategy.finish_gradients()
            optimizer.step()
            optimizer.zero_grad()
        return STEPS

    return turn


def main(world: World) -> None:
    megabits = os.environ[LINK]
    strategies = {
        name: build_strategy(TrainConfig(parallel=parallel), world, total_steps=1)
        for name, parallel in CONTESTANTS.items()
    }
    contestants = {name: training(strategy) for name, strategy in strategies.items()}
    name = f"compression: {megabits} Mbit/s"
    compare_in_workers(world, name, contestants, {}, Unit("ms a step", 1e3), ROUNDS)
    savings = {}
    for compressed, strategy in strategies.items():
        if strategy.traffic.plain_bytes:
            strategy.traffic.take()
            contestants[compressed]()
            traffic = strategy.traffic.take()
            savings[compressed] = {
                "plain_bytes": traffic.plain_bytes // STEPS,
                "sent_bytes": traffic.sent_bytes // STEPS,
            }
    if world.is_main:
        for compressed, row in savings.items():
            print(
                f"  {compressed:24}{row['sent_bytes'] / 1e6:.2f} MB a step instead of {row['plain_bytes'] / 1e6:.2f} MB"
            )
        append_record({"name": f"{name}, bytes a step", "savings": savings})


if __name__ == "__main__":
    if Place.from_environment().launcher == "none":
        os.environ[LINK] = f"{float(sys.argv[1]) if len(sys.argv) > 1 else MEGABITS:g}"
        os.environ["OMP_NUM_THREADS"] = "1"
        sys.exit(run_over_limited_link(float(os.environ[LINK]), sys.argv))
    in_workers(2, main)
