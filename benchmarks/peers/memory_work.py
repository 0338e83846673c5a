"""Shared by the jobs of memory.py: networks of `lockstep.models`, noise stored as bytes, and memory measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from lockstep.models import registry

SHAPES = {"digits-net": (1, 8), "mnist-net": (1, 28), "cifar-small": (3, 32), "resnet18": (3, 32)}  # channels, side
PEAK_BATCH, GROWTH_BATCH = 128, 16
GROWTH_NET, EPOCH_STEPS = "digits-net", 50
EVERY_SECONDS = 0.25
ASK_EVERY = 100  # steps between agreements on whether time is over


def own_bytes() -> dict[str, int]:
    """Return this process's memory: USS, PSS, and the peak of resident memory."""
    kilobytes: dict[str, int] = {}
    for name in ("smaps_rollup", "status"):
        for line in Path("/proc/self", name).read_text().splitlines():
            fields = line.split()
            if len(fields) == 3 and fields[2] == "kB":
                kilobytes[fields[0].rstrip(":")] = int(fields[1])
    uss = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {"uss": 1024 * uss, "pss": 1024 * kilobytes["Pss"], "peak": 1024 * kilobytes["VmHWM"]}


class Samples:
    """Samples this process's memory periodically, as [step, bytes] pairs."""

    def __init__(self) -> None:
        self.pairs: list[list[int]] = []
        self._steps, self._next = 0, 0.0

    def step(self) -> int:
        """Count a step; return the number of steps."""
        self._steps += 1
        if time.monotonic() >= self._next:
            self.pairs.append([self._steps, own_bytes()["uss"]])
            self._next = time.monotonic() + EVERY_SECONDS
        return self._steps

    def until(self, is_over: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that counts a step and returns whether to continue.

        It calls `is_over` after the same steps on all workers.
        """
        return lambda: self.step() % ASK_EVERY != 0 or not is_over()


def steps(count: int) -> Callable[[], bool]:
    """Return a function that returns whether to continue, for `count` steps."""
    left = iter(range(count - 1, -1, -1))
    return lambda: next(left) > 0


def noise(net: str, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 images [N, C, H, W] and int64 labels [N], equal on all workers."""
    torch.manual_seed(0)
    channels, side = SHAPES[net]
    pixels = torch.randint(0, 256, (samples, channels, side, side), dtype=torch.uint8)
    return pixels, torch.randint(0, 10, (samples,))


def network(net: str) -> nn.Module:
    channels, side = SHAPES[net]
    return registry.build(net, 10, channels, side)


def batches(net: str, samples: int, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless batches of noise, in a new order each epoch."""
    pixels, labels = noise(net, samples)
    while True:
        for indices in torch.randperm(samples).split(batch):
            yield pixels[indices].float().mul_(1 / 74).sub_(1.7), labels[indices]
