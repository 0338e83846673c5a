"""How much overhead per step do Lockstep's training loop, and its loader for your own loop, have?

    python benchmarks/loop_overhead.py DATA_DIR

Lockstep's loop is the real one, with loader, seeding, exact metrics, records, TensorBoard and progress, but without
evaluation and checkpoints. The bare loop does the same arithmetic (index, convert to float, normalize; model;
optimizer) on batches of 128 and reads every 20th loss. One process, one thread, one core; a turn is an epoch of 20
steps. Bars, by CPU time: at most 1.02 for a small convolutional network, whose step takes 20 to 60 ms, on noise of
3 x 32 x 32; at most 1.10 for mnist-net on MNIST. On a terminal, Lockstep also draws its progress. The bare loop
competes twice: the second one's deviation from 1 is the measurement noise.

Your own loop trains a linear layer on batches of 64 with `world.loader`, `run.backward` and `run.step`, against the
same loop with torch's DataLoader and DistributedSampler. The data sets are a TensorDataset of 32 numbers, and images of
3 x 64 x 64 that are flipped at random and normalized one by one. Bars, by CPU time: at most 1.6 and 1.1.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import Bar, Unit, Work, argument, compare, existing_folder, keep_memory, pin
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from work import noise, sgd

from lockstep.config.schema import RunConfig, TrainConfig
from lockstep.data.sets import ImageData, MemorySplit
from lockstep.data.sources import torchvision_sets
from lockstep.run.connect import TrainingWorld
from lockstep.run.records.trackers import TerminalConsole, Tracker
from lockstep.train.fit import configure
from lockstep.train.loop import train_epoch
from lockstep.train.network import build_model
from lockstep.train.setup import build_job
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

STEPS, BATCH = 20, 128
SAMPLES = STEPS * BATCH
OWN_STEPS, OWN_BATCH = 60, 64


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


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of 3 x 64 x 64, flipped at random and normalized one by one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (OWN_STEPS * OWN_BATCH, 3, 64, 64)
        self.images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image.float().div_(255).sub_(0.5).div_(0.29), index % 10


def linear(data: Dataset[Any]) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(data[0][0].numel(), 10))
    return model, sgd(model)


def bare_own_loop(data: Dataset[Any]) -> Work:
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    loader, epochs = DataLoader(data, OWN_BATCH, sampler=sampler), count()
    model, optimizer = linear(data)

    def turn() -> int:
        sampler.set_epoch(next(epochs))
        for step, (inputs, labels) in enumerate(loader, start=1):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                loss.item()
        return OWN_STEPS

    return turn


def own_loop(data: Dataset[Any], run_dir: Path) -> Work:
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    loader = world.loader(data, OWN_BATCH, shuffle=True)
    model, optimizer = linear(data)
    run = world.run(run_dir, loader=loader, model=model, optimizer=optimizer, checkpoint_epochs=0)
    epochs = run.epochs(1000)

    def turn() -> int:
        next(epochs)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            run.backward(loss)
            optimizer.step()
            run.step(loss=loss)
        return OWN_STEPS

    return turn


def compete_own_loops(name: str, data: Dataset[Any], bar: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            "DataLoader": bare_own_loop(data),
            "DataLoader, again": bare_own_loop(data),
            "Lockstep": own_loop(data, Path(folder)),
        }
        bars = {"Lockstep": Bar("at most", bar, "cpu")}
        compare(f"loop_overhead: own loop, {name}", contestants, bars, Unit("ms per step", 1000), rounds=41)


def main(data_dir: Path) -> None:
    pin()
    keep_memory()
    numbers = torch.randn(OWN_STEPS * OWN_BATCH, 32)
    compete_own_loops("tensors", TensorDataset(numbers, torch.zeros(len(numbers), dtype=torch.long)), 1.6)
    compete_own_loops("64 x 64 images", Images(), 1.1)
    config = configure(batch_size=BATCH, epochs=1000, lr=0.01, lr_scaling="none", schedule="constant", device="cpu")
    compete("small net", noise(3, 32, SAMPLES), small_net(), config, Bar("at most", 1.02, "cpu"))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, arch="mnist-net"))
    data = mnist(data_dir)
    compete("mnist-net", data, build_model(config, data), config, Bar("at most", 1.10, "cpu"))


if __name__ == "__main__":
    main(argument("data_dir", existing_folder))
