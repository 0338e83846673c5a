"""How many photographs a second does Lockstep make ready, against torchvision's ImageFolder in a DataLoader?

    python benchmarks/jpeg_pipeline.py FOLDER          # FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg

Both have two loader processes and the same two cores, and give float32 batches of 32 normalised images of 224 x 224,
cropped at random from 8 % of the area on, resized and flipped. The packed set holds the same images with a short side
of 256 at most. Bars: the folder at least 1.6 times, the packed set at least 3 times torchvision's rate. Then, for an
epoch of each, what the processes read: bytes, and the system calls that read, open and look up files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from harness import Bar, Unit, Work, compare
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from lockstep.config import AugmentConfig
from lockstep.data.folder import IMAGENET_MEAN, IMAGENET_STD
from lockstep.data.loaders import loaders

BATCH, PROCESSES, PASSES = 32, 2, 4
Batches = Callable[[], Iterator[Sequence[torch.Tensor]]]


def lockstep_batches(folder: Path) -> Batches:
    augment = AugmentConfig(flip=True)
    batches, _ = loaders(str(folder), BATCH, augment=augment, workers=PROCESSES)
    return lambda: iter(batches)


def torchvision_batches(folder: Path) -> Batches:
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    dataset = datasets.ImageFolder(folder / "train", transform)
    batches = DataLoader(dataset, BATCH, shuffle=True, drop_last=True, num_workers=PROCESSES, persistent_workers=True)
    return lambda: iter(batches)


def all_images(batches: Batches) -> Work:
    return lambda: sum(len(labels) for _ in range(PASSES) for _, labels in batches())


CONTESTANTS = {"torchvision": torchvision_batches, "Lockstep": lockstep_batches, "Lockstep, packed": lockstep_batches}


def pack(folder: Path, packed: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "data", "pack", str(folder), str(packed), "--short-side", "256"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        packed = Path(scratch) / "packed"
        pack(folder, packed)
        places = dict.fromkeys(CONTESTANTS, folder) | {"Lockstep, packed": packed}
        works = {name: all_images(make(places[name])) for name, make in CONTESTANTS.items()}
        bars = {"Lockstep": Bar("at least", 1.6), "Lockstep, packed": Bar("at least", 3)}
        compare("jpeg_pipeline", works, bars, Unit("images/s", per_second=True), rounds=9)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
