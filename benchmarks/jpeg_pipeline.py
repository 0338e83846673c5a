"""How many photographs per second does Lockstep load, compared with torchvision's ImageFolder, timm and WebDataset?

    python benchmarks/jpeg_pipeline.py FOLDER          # FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg

All have two loader processes on the same two cores and return float32 batches of 32 normalized images of 224 x 224,
cropped at random to at least 8 % of the area, resized and flipped. The packed set has the same images with a short side
of at most 256; WebDataset reads the folder's files from four tar files. timm and WebDataset run in their own
environments. Bars: the folder at least 1.6 times, the packed set at least 3 times torchvision's rate.

It also measures what an uncached epoch reads: bytes and requests of the disk (including those of other processes), and
the process's read calls and major page faults (as the packed set is read through memory maps).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import psutil
import torch
from contestants import contestants
from environments import python_with
from harness import Bar, Unit, Work, append_record, argument, compare, existing_folder
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data import catalog
from lockstep.data.loaders import TrainLoader, reader_for
from lockstep.data.readers import Placement
from lockstep.data.sharding import Sharding
from lockstep.data.sources.image_folder import IMAGENET_MEAN, IMAGENET_STD

CPU = torch.device("cpu")
BATCH, PROCESSES, PASSES = 32, 2, 4
Batches = Callable[[], Iterator[Sequence[torch.Tensor]]]


def lockstep_batches(folder: Path) -> Batches:
    loader, epochs = loader_of(folder, PROCESSES), count()
    return lambda: ((batch.images, batch.labels) for batch in loader.epoch(next(epochs)))


def loader_of(folder: Path, processes: int) -> TrainLoader:
    data = catalog.load(DataConfig(dataset=str(folder)), download=False)
    reader = reader_for(data.train, data.input, Placement(CPU), AugmentConfig(flip=True), processes=processes)
    return TrainLoader(reader, Sharding(len(data.train), BATCH, drop_last=True), CPU)


def torchvision_dataset(folder: Path) -> datasets.ImageFolder:
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    return datasets.ImageFolder(folder / "train", transform)


def torchvision_batches(folder: Path) -> Batches:
    dataset = torchvision_dataset(folder)
    batches = DataLoader(dataset, BATCH, shuffle=True, drop_last=True, num_workers=PROCESSES, persistent_workers=True)
    return lambda: iter(batches)


def all_images(batches: Batches) -> Work:
    return lambda: sum(len(labels) for _ in range(PASSES) for _, labels in batches())


CONTESTANTS = {"torchvision": torchvision_batches, "Lockstep": lockstep_batches, "Lockstep, packed": lockstep_batches}


def pack(folder: Path, packed: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "data", "pack", str(folder), str(packed), "--short-side", "256"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def what_an_epoch_reads(folder: Path) -> dict[str, int]:
    """Count the reads of an epoch in one process, after evicting the files from the page cache."""
    loader = loader_of(folder, processes=0)
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = counters()
    images = sum(len(batch.labels) for batch in loader.epoch(0))
    after = counters()
    return {"images": images} | {name: after[name] - before[name] for name in before}


def counters() -> dict[str, int]:
    disks, process = psutil.disk_io_counters(), psutil.Process().io_counters()
    assert disks is not None
    return {
        "disk_bytes": disks.read_bytes,
        "disk_reads": disks.read_count,
        "read_calls": process.read_count,
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
    }


def compare_reading(folders: Mapping[str, Path]) -> None:
    print("\nreads of an uncached epoch")
    for name, folder in folders.items():
        figures = what_an_epoch_reads(folder)
        print(f"  {name:24}" + ", ".join(f"{figure:,} {what.replace('_', ' ')}" for what, figure in figures.items()))
        append_record({"name": f"jpeg_pipeline: an epoch of the {name}", **figures})


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        packed = Path(scratch) / "packed"
        pack(folder, packed)
        compare_reading({"folder": folder, "packed set": packed})  # first, because mapped files stay cached
        folders = dict.fromkeys(CONTESTANTS, folder) | {"Lockstep, packed": packed}
        works = {name: all_images(make(folders[name])) for name, make in CONTESTANTS.items()}
        bars = {"Lockstep": Bar("at least", 1.6), "Lockstep, packed": Bar("at least", 3)}
        arguments = [str(folder.resolve()), str(BATCH), str(PROCESSES), str(PASSES)]
        peers = {
            "timm": [python_with("timm"), "timm_pipeline.py", *arguments],
            "WebDataset": [python_with("webdataset"), "webdataset_pipeline.py", *arguments],
        }
        with contestants(peers, workers=2) as turns:  # one thread each
            compare("jpeg_pipeline", works | turns, bars, Unit("images/s", per_second=True), rounds=9)


if __name__ == "__main__":
    main(argument("folder", existing_folder))
