"""What the jobs of memory.py have in common: networks of the zoo, noise held as bytes, and reading one's own memory."""

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
ASK_EVERY = 100  # steps, after which workers agree whether time is over


def own_bytes() -> dict[str, int]:
    """This process's memory: its own (uss), with its share of what others map too (pss), and the most so far."""
    kilobytes: dict[str, int] = {}
    for name in ("smaps_rollup", "status"):
        for line in Path("/proc/self", name).read_text().splitlines():
            words = line.split()
            if len(words) == 3 and words[2] == "kB":
                kilobytes[words[0].rstrip(":")] = int(words[1])
    uss = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {"uss": 1024 * uss, "pss": 1024 * kilobytes["Pss"], "peak": 1024 * kilobytes["VmHWM"]}


class Samples:
    """Reads this process's memory from time to time: [step, bytes] pairs."""

    def __init__(self) -> None:
        self.pairs: list[list[int]] = []
        self._steps, self._next = 0, 0.0

    def step(self) -> int:
        """Count a step; how many there were."""
        self._steps += 1
        if time.monotonic() >= self._next:
            self.pairs.append([self._steps, own_bytes()["uss"]])
            self._next = time.monotonic() + EVERY_SECONDS
        return self._steps

    def until(self, is_over: Callable[[], bool]) -> Callable[[], bool]:
        """Counts a step a call, and says whether to go on; `is_over` is asked of all workers after the same steps."""
        return lambda: self.step() % ASK_EVERY != 0 or not is_over()


def steps(count: int) -> Callable[[], bool]:
    """Whether to go on after each of so many steps."""
    left = iter(range(count - 1, -1, -1))
    return lambda: next(left) > 0


def noise(net: str, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, uint8 [N, C, H, W], and labels, int64 [N]: the same for all workers."""
    torch.manual_seed(0)
    channels, side = SHAPES[net]
    pixels = torch.randint(0, 256, (samples, channels, side, side), dtype=torch.uint8)
    return pixels, torch.randint(0, 10, (samples,))


def network(net: str) -> nn.Module:
    channels, side = SHAPES[net]
    return registry.build(net, 10, channels, side)


def batches(net: str, samples: int, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of noise without end, in a new order each epoch."""
    pixels, labels = noise(net, samples)
    while True:
        for indices in torch.randperm(samples).split(batch):
            yield pixels[indices].float().mul_(1 / 74).sub_(1.7), labels[indices]
