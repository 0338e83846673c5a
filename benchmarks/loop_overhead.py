"""What does Lockstep's training loop cost a step, over a bare loop written by hand?

    python benchmarks/loop_overhead.py DATA_DIR

Lockstep's loop is the real one: loader, seeding, exact metrics, records, TensorBoard, progress; evaluation and
checkpoints are left out. The bare loop does the same arithmetic (index, to float, normalise; model; optimizer) on
batches of 128 and reads one loss in 20 steps. One process, one thread, one core; a turn is an epoch of 40 steps.
Bars, by CPU time: at most 1.02 on a convolutional model whose step takes some tens of milliseconds, on noise of
3 x 32 x 32; at most 1.10 on mnist-net and MNIST. "With bar" draws the progress bar of a terminal besides. The bare
loop competes twice: what the second is off 1 is noise.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import Bar, Unit, Work, compare, pin
from rich.console import Console
from torch import nn

from lockstep.config import TrainConfig
from lockstep.data import named
from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.train.fit import configure
from lockstep.train.loop import _train_epoch
from lockstep.train.setup import build_job, build_model
from lockstep.train.trackers.base import TrackerGroup
from lockstep.train.trackers.console import TerminalConsole
from lockstep.world import Place, World

STEPS, BATCH = 40, 128
SAMPLES = STEPS * BATCH


def noise() -> ImageData:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (SAMPLES, 3, 32, 32), generator=generator, dtype=torch.uint8)
    split = MemorySplit(pixels, torch.randint(0, 10, (SAMPLES,), generator=generator))
    return ImageData("noise", tuple("0123456789"), split, split, InputSpec(3, 32, 32, (0.5,) * 3, (0.29,) * 3))


def mnist(data_dir: Path) -> ImageData:
    data = named.load("mnist", data_dir, download=False)
    assert isinstance(data.train, MemorySplit)
    return dataclasses.replace(data, train=MemorySplit(data.train.images[:SAMPLES], data.train.labels[:SAMPLES]))


def small_net(channels: int = 16) -> nn.Module:
    def layer(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    widths = (3, channels, 2 * channels, 4 * channels)
    layers = [part for i, stride in enumerate((1, 2, 2)) for part in layer(widths[i], widths[i + 1], stride)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def bare_loop(model: nn.Module, data: ImageData, config: TrainConfig) -> Work:
    images, labels = data.train.images, data.train.labels  # type: ignore[union-attr]
    mean, std = (torch.tensor(part).view(1, -1, 1, 1) for part in (data.input.mean, data.input.std))
    scale, shift = 1 / (255 * std), -mean / std
    rules = config.optim
    optimizer = torch.optim.SGD(model.parameters(), rules.lr, rules.momentum, 0.0, rules.weight_decay, rules.nesterov)
    model.train()

    def turn() -> int:
        for step, samples in enumerate(torch.randperm(SAMPLES).split(BATCH), start=1):
            batch = images[samples].float().mul_(scale).add_(shift)
            loss = F.cross_entropy(model(batch), labels[samples])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % config.run.log_every == 0:
                loss.item()
        return STEPS

    return turn


def lockstep_loop(model: nn.Module, data: ImageData, config: TrainConfig, run_dir: Path, with_bar: bool) -> Work:
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, run_dir=run_dir))
    job = build_job(config, World(Place(), torch.device("cpu")), data, model)
    console = TerminalConsole(Console(file=open(os.devnull, "w"), force_terminal=True, width=120))
    if with_bar:
        job = dataclasses.replace(job, tracker=TrackerGroup([job.tracker, console]))

    def turn() -> int:
        _train_epoch(job)
        console.close()  # its thread must not run in the others' turns
        return STEPS

    return turn


def compete(name: str, data: ImageData, model: nn.Module, config: TrainConfig, most: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            "bare loop": bare_loop(copy.deepcopy(model), data, config),
            "bare loop, again": bare_loop(copy.deepcopy(model), data, config),
            "Lockstep": lockstep_loop(copy.deepcopy(model), data, config, Path(folder, "plain"), False),
            "Lockstep, with bar": lockstep_loop(copy.deepcopy(model), data, config, Path(folder, "bar"), True),
        }
        bars = {"Lockstep": Bar("at most", most), "Lockstep, with bar": Bar("at most", most)}
        compare(f"loop_overhead: {name}", contestants, bars, Unit("ms a step", 1000), 21, "cpu")


def main(data_dir: Path) -> None:
    pin()
    config = configure(batch_size=BATCH, epochs=1000, lr=0.01, lr_scaling="none", schedule="constant", device="cpu")
    compete("small convolutional net", noise(), small_net(), config, 1.02)
    data, config = mnist(data_dir), dataclasses.replace(config, model=dataclasses.replace(config.model, arch="mnist-net"))
    compete("mnist-net", data, build_model(config, data), config, 1.10)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
