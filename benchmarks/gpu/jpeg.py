"""How many normalized photographs per second reach one GPU, decoded on the CPU or on the GPU?

    python benchmarks/gpu jpeg FOLDER      # FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg

Contestants: torchvision's ImageFolder in a DataLoader with pinned memory, Lockstep decoding in loader processes, and
Lockstep decoding on the GPU (nvJPEG, `--decode gpu`). All have the same number of processes and return batches of 64
images of 224 x 224, cropped at random, resized and flipped. Takes a few minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import Unit, Work
from jpeg_pipeline import torchvision_dataset
from torch.utils.data import DataLoader, RandomSampler

from gpu import recording
from gpu.device import DEVICE, ON_GPU, is_left_out, size, synchronize
from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data import catalog
from lockstep.data.loaders import TrainLoader, reader_for
from lockstep.data.readers import Placement
from lockstep.data.sharding import Sharding

BATCH = size(64, 8)
IMAGES = size(60, 2) * BATCH


def torchvision_work(folder: Path, processes: int) -> Work:
    dataset = torchvision_dataset(folder)
    sampler = RandomSampler(dataset, replacement=True, num_samples=IMAGES)
    kept = processes > 0
    batches = DataLoader(
        dataset, BATCH, sampler=sampler, num_workers=processes, persistent_workers=kept, pin_memory=ON_GPU
    )

    def work() -> int:
        count = sum(len(images.to(DEVICE, non_blocking=True)) for images, _ in batches)
        synchronize()
        return count

    return work


def lockstep_work(folder: Path, processes: int, on_device: bool) -> Work:
    data = catalog.load(DataConfig(dataset=str(folder)))
    augment = AugmentConfig(flip=True)
    reader = reader_for(data.train, data.input, Placement(DEVICE), augment, processes=processes, on_device=on_device)
    loader = TrainLoader(reader, Sharding(len(data.train), BATCH, drop_last=True), DEVICE)

    def work() -> int:
        passes = range(-(-IMAGES // len(data.train)))
        count = sum(len(batch.images) for epoch in passes for batch in loader.epoch(epoch))
        synchronize()
        return count

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=size(8, 0))
    parser.add_argument("--seconds", type=float)
    asked = parser.parse_args()
    works = {
        "torchvision": torchvision_work(asked.folder, asked.processes),
        "Lockstep": lockstep_work(asked.folder, asked.processes, on_device=False),
    }
    if not is_left_out("Lockstep, --decode gpu"):
        works["Lockstep, --decode gpu"] = lockstep_work(asked.folder, asked.processes, on_device=True)
    recording.compare("jpeg", works, {}, Unit("images/s", per_second=True), rounds=size(7, 2))


if __name__ == "__main__":
    main()
