"""How much overhead per step does Lockstep's training loop have over a hand-written loop?

    python benchmarks/loop_overhead.py DATA_DIR

Lockstep's loop is the real one, with loader, seeding, exact metrics, records, TensorBoard and progress, but without
evaluation and checkpoints. The bare loop does the same arithmetic (index, convert to float, normalize; model;
optimizer) on batches of 128 and reads every 20th loss. One process, one thread, one core; a turn is an epoch of 20
steps. Bars, by CPU time: at most 1.02 for a small convolutional network, whose step takes 20 to 60 ms, on noise of
3 x 32 x 32; at most 1.10 for mnist-net on MNIST. On a terminal, Lockstep also draws its progress. The bare loop
competes twice: the second one's deviation from 1 is the measurement noise.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import Bar, Unit, Work, argument, compare, existing_folder, keep_memory, pin
from rich.console import Console
from torch import nn
from work import noise

from lockstep.config.schema import RunConfig, TrainConfig
from lockstep.data.sets import ImageData, MemorySplit
from lockstep.data.sources import torchvision_sets
from lockstep.run.records.trackers import TerminalConsole, Tracker
from lockstep.train.fit import configure
from lockstep.train.loop import train_epoch
from lockstep.train.setup import build_job, build_model
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

STEPS, BATCH = 20, 128
SAMPLES = STEPS * BATCH


def mnist(data_dir: Path) -> ImageData:
    data = torchvision_sets.load("mnist", data_dir, download=False)
    assert isinstance(data.train, MemorySplit)
    return dataclasses.replace(data, train=MemorySplit(data.train.images[:SAMPLES], data.train.labels[:SAMPLES]))


def small_net() -> nn.Module:
    def layer(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    layers = [*layer(3, 16, 1), *layer(16, 32, 2), *layer(32, 64, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def bare_loop(model: nn.Module, data: ImageData, config: TrainConfig) -> Work:
    assert isinstance(data.train, MemorySplit)
    images, labels = data.train.images, data.train.labels
    mean, std = (torch.tensor(part).double().view(1, -1, 1, 1) for part in (data.input.mean, data.input.std))
    scale, shift = (1 / (255 * std)).float(), (-mean / std).float()
    rules = {name: getattr(config.optim, name) for name in ("lr", "momentum", "nesterov", "weight_decay")}
    optimizer = torch.optim.SGD(model.parameters(), **rules)
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


def lockstep_loop(model: nn.Module, data: ImageData, config: TrainConfig, run_dir: Path, console: Tracker) -> Work:
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, run_dir=run_dir))
    job = build_job(config, World(RankInfo(), torch.device("cpu")), data, model)
    job.session.trackers.append(console)

    def turn() -> int:
        train_epoch(job)
        console.close()  # its thread must not run during other contestants' turns
        return STEPS

    return turn


def compete(name: str, data: ImageData, model: nn.Module, config: TrainConfig, bar: Bar) -> None:
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        terminal = TerminalConsole(RunConfig(), 10, Console(file=nowhere, force_terminal=True, width=120))
        contestants = {
            "bare loop": bare_loop(deepcopy(model), data, config),
            "bare loop, again": bare_loop(deepcopy(model), data, config),
            "Lockstep": lockstep_loop(deepcopy(model), data, config, Path(folder, "plain"), Tracker()),
            "Lockstep on a terminal": lockstep_loop(deepcopy(model), data, config, Path(folder, "bar"), terminal),
        }
        bars = {"Lockstep": bar, "Lockstep on a terminal": bar}
        compare(f"loop_overhead: {name}", contestants, bars, Unit("ms per step", 1000), rounds=41)


def main(data_dir: Path) -> None:
    pin()
    keep_memory()
    config = configure(batch_size=BATCH, epochs=1000, lr=0.01, lr_scaling="none", schedule="constant", device="cpu")
    compete("small net", noise(3, 32, SAMPLES), small_net(), config, Bar("at most", 1.02, "cpu"))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, arch="mnist-net"))
    data = mnist(data_dir)
    compete("mnist-net", data, build_model(config, data), config, Bar("at most", 1.10, "cpu"))


if __name__ == "__main__":
    main(argument("data_dir", existing_folder))
