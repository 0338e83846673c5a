"""The work shared by all contestants of `benchmarks/throughput.py`: network, images, batch and optimizer.

A turn is an epoch of `steps` steps. The peers load batches as in their examples, with torchvision's data sets and
transforms in a DataLoader ("own"), or with `lockstep.data.loaders` ("lockstep"). All contestants use networks of
`lockstep.models`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import datasets, transforms

from lockstep.data.loaders import TrainLoader
from lockstep.models import registry

LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 5e-4
MEANS = {"mnist": (0.1307,), "cifar10": (0.4914, 0.4822, 0.4465), "photographs": (0.485, 0.456, 0.406)}
DEVIATIONS = {"mnist": (0.3081,), "cifar10": (0.2470, 0.2435, 0.2616), "photographs": (0.229, 0.224, 0.225)}


@dataclass(frozen=True)
class Case:
    """A case to measure in images per second.

    Args:
        arch: Name of the network, as for `lockstep train --model`.
        batch: Images per worker and step.
        steps: Steps per turn.
    """

    arch: str
    images: str
    side: int
    classes: int
    batch: int
    steps: int
    crop_and_flip: bool

    @property
    def channels(self) -> int:
        return len(MEANS[self.images])


CASES = {
    "mnist": Case("mnist_example:Net", "mnist", 28, 10, 64, 234, crop_and_flip=False),
    "cifar-small": Case("cifar-small", "cifar10", 32, 10, 64, 20, crop_and_flip=True),
    "cifar-resnet18": Case("resnet18", "cifar10", 32, 10, 32, 4, crop_and_flip=True),
    "resnet18-224": Case("torchvision/resnet18", "photographs", 224, 1000, 8, 10, crop_and_flip=True),
}


@dataclass(frozen=True)
class Task:
    """The arguments of a peer: a case, its data, and the source of batches."""

    case: Case
    folder: Path
    is_own_pipeline: bool
    is_contiguous: bool

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return registry.build(self.case.arch, self.case.classes, self.case.channels, self.case.side)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)

    def batches(self, rank: int, workers: int, processes: int = 1) -> Iterable[Any]:
        """Return an epoch's (images, labels) of one worker, from its shuffled share of the data.

        Args:
            processes: Number of loader processes of the peer's own pipeline.
        """
        if self.is_own_pipeline:
            dataset = self.dataset(workers)
            sampler: Any = DistributedSampler(dataset, workers, rank)
            return DataLoader(
                dataset,
                self.case.batch,
                sampler=sampler,
                drop_last=True,
                num_workers=processes,
                persistent_workers=processes > 0,
            )
        return self.lockstep_batches(rank, workers)

    def dataset(self, workers: int) -> Dataset[Any]:
        """Return a data set with the images of one epoch, transformed one at a time."""
        case = self.case
        change: list[Any] = []
        if case.crop_and_flip and case.side >= 224:
            change = [transforms.RandomResizedCrop(case.side), transforms.RandomHorizontalFlip()]
        elif case.crop_and_flip:
            change = [transforms.RandomCrop(case.side, padding=4), transforms.RandomHorizontalFlip()]
        normalize = transforms.Normalize(MEANS[case.images], DEVIATIONS[case.images])
        transform = transforms.Compose([*change, transforms.ToTensor(), normalize])
        whole: Any
        if case.images == "mnist":
            whole = datasets.MNIST(str(self.folder), transform=transform)
        elif case.images == "cifar10":
            whole = Arrays(self.folder / "cifar10.npz", transform)
        else:
            whole = datasets.ImageFolder(str(self.folder / "photographs" / "train"), transform)
        count = case.batch * case.steps * workers
        return Subset(whole, [sample % len(whole) for sample in range(count)])

    def lockstep_batches(self, rank: int, workers: int) -> Iterable[Any]:
        from lockstep_job import data_of, loader_of

        loader = loader_of(self.case, data_of(self.case, self.folder, workers), rank, workers)
        return Passes(loader)


class Passes:
    """Each pass is the next epoch of a loader, as pairs (images, labels)."""

    def __init__(self, loader: TrainLoader):
        self._loader, self._epochs = loader, count()

    def __len__(self) -> int:
        return self._loader.sharding.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((batch.images, batch.labels) for batch in self._loader.epoch(next(self._epochs)))


class Arrays(Dataset[tuple[torch.Tensor, int]]):
    """Images in an array [N, H, W, C], stored and returned like those of torchvision's CIFAR10."""

    def __init__(self, path: Path, transform: transforms.Compose):
        content = np.load(path)
        self._images, self._labels, self._transform = content["images"], content["labels"].tolist(), transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(Image.fromarray(self._images[index])), self._labels[index]


def asked() -> Task:
    """Parse the command line: CASE FOLDER own|lockstep [--contiguous]."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("batches", choices=("own", "lockstep"))
    parser.add_argument("--contiguous", action="store_true", help="do not use channels_last in Lockstep's job")
    given = parser.parse_args()
    return Task(CASES[given.case], given.folder, given.batches == "own", given.contiguous)
