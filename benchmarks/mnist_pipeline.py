"""How many MNIST images per second does Lockstep load, compared with a DataLoader over torchvision's MNIST?

    python benchmarks/mnist_pipeline.py DATA_DIR

Both shuffle and return float32 batches of 128 with the same values. Lockstep keeps the data set in memory as bytes and
processes a batch at a time; the peer processes one image at a time (ToTensor, Normalize), like PyTorch's MNIST example.
Bar: at least 10 times the DataLoader's rate, in one process, on one core with one thread. A second DataLoader has a
loader process, which may use every core and whose CPU time is not counted.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from harness import Bar, Unit, Work, argument, compare, existing_folder, pin
from torch.utils.data import DataLoader, RandomSampler
from torchvision import datasets, transforms

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data import catalog
from lockstep.data.loaders import EvalLoader, TrainLoader, reader_for
from lockstep.data.readers import Placement
from lockstep.data.sharding import Sharding

CPU = torch.device("cpu")
BATCH = 128
PASSES = 20  # over 60,000 images per turn, for Lockstep
SAMPLES = 79 * BATCH  # about 10,000 images per turn, for the DataLoader
MEAN, STD = 0.1307, 0.3081


def lockstep_pipeline(data_dir: Path) -> Work:
    data = catalog.load(DataConfig(dataset="mnist", data_dir=data_dir), download=False)
    reader = reader_for(data.train, data.input, Placement(CPU), AugmentConfig())
    loader = TrainLoader(reader, Sharding(len(data.train), BATCH, drop_last=True), CPU)
    return lambda: sum(len(batch.labels) for epoch in range(PASSES) for batch in loader.epoch(epoch))


def data_loader(dataset: datasets.MNIST, processes: int) -> Work:
    sampler = RandomSampler(dataset, num_samples=SAMPLES)
    kept = processes > 0  # so that processes start in the warm-up
    batches = DataLoader(
        dataset, BATCH, sampler=sampler, num_workers=processes, persistent_workers=kept, worker_init_fn=use_all_cores
    )
    return lambda: sum(len(labels) for _, labels in batches)


def use_all_cores(_: int) -> None:
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def check_equal(data_dir: Path, dataset: datasets.MNIST) -> None:
    """Check that both return the same values for the same images."""
    data = catalog.load(DataConfig(dataset="mnist", data_dir=data_dir), download=False)
    reader = reader_for(data.val, data.input, Placement(CPU), AugmentConfig())
    batch = next(iter(EvalLoader(reader, len(data.val), BATCH, 0, 1, CPU)))
    peers = [dataset[index] for index in range(BATCH)]
    torch.testing.assert_close(batch.images, torch.stack([image for image, _ in peers]))
    assert batch.labels.tolist() == [label for _, label in peers]


def main(data_dir: Path) -> None:
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    train, test = (datasets.MNIST(data_dir, train=train, transform=transform) for train in (True, False))
    check_equal(data_dir, test)
    pin()
    contestants = {
        "DataLoader": data_loader(train, 0),
        "DataLoader, 1 process": data_loader(train, 1),
        "Lockstep": lockstep_pipeline(data_dir),
    }
    bars = {"Lockstep": Bar("at least", 10)}
    compare("mnist_pipeline", contestants, bars, Unit("images/s", per_second=True), rounds=9)


if __name__ == "__main__":
    main(argument("data_dir", existing_folder))
