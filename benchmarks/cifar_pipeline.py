"""How many augmented CIFAR-10 images per second does Lockstep load, compared with torchvision's transforms?

    python benchmarks/cifar_pipeline.py FOLDER      # FOLDER/train/CLASS/ and FOLDER/test/CLASS/, 32 x 32

Both shuffle and return float32 batches of 128 images, cropped at random after padding by 4, mirrored and normalized.
Lockstep keeps the data set in memory as bytes and processes a batch at a time. The peer keeps it as an array and
processes one image at a time (array, PIL image, RandomCrop, RandomHorizontalFlip, ToTensor, Normalize), like
torchvision's CIFAR10. Bar: at least 20 times the DataLoader's rate, in one process, on one core with one thread.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from harness import Bar, Unit, Work, argument, compare, existing_folder, pin
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data.loaders import TrainLoader, reader_for
from lockstep.data.readers import Placement
from lockstep.data.sets import ImageData, MemorySplit
from lockstep.data.sharding import Sharding
from lockstep.data.sources import image_folder

BATCH = 128
PASSES = 5  # over 50,000 images per turn, for Lockstep
SAMPLES = 79 * BATCH  # about 10,000 images per turn, for the DataLoader
CPU = torch.device("cpu")


class ArrayDataset(Dataset[tuple[torch.Tensor, int]]):
    """Images in an array [N, H, W, C], stored and returned like those of torchvision's CIFAR10."""

    def __init__(self, images: npt.NDArray[np.uint8], labels: list[int], transform: transforms.Compose):
        self._images, self._labels, self._transform = images, labels, transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(Image.fromarray(self._images[index])), self._labels[index]


def lockstep_pipeline(data: ImageData) -> Work:
    reader = reader_for(data.train, data.input, Placement(CPU), AugmentConfig(shift=4, flip=True))
    loader = TrainLoader(reader, Sharding(len(data.train), BATCH, drop_last=True), CPU)
    return lambda: sum(len(batch.labels) for epoch in range(PASSES) for batch in loader.epoch(epoch))


def data_loader(data: ImageData) -> Work:
    assert isinstance(data.train, MemorySplit)
    change = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose(
        [*change, transforms.ToTensor(), transforms.Normalize(data.input.mean, data.input.std)]
    )
    images = data.train.images.permute(0, 2, 3, 1).contiguous().numpy()
    dataset = ArrayDataset(images, data.train.labels.tolist(), transform)
    batches = DataLoader(dataset, BATCH, sampler=RandomSampler(dataset, num_samples=SAMPLES))
    return lambda: sum(len(labels) for _, labels in batches)


def main(source: Path) -> None:
    data = image_folder.load(source, DataConfig(dataset=str(source)))
    pin()
    contestants = {"DataLoader": data_loader(data), "Lockstep": lockstep_pipeline(data)}
    bars = {"Lockstep": Bar("at least", 20)}
    compare("cifar_pipeline", contestants, bars, Unit("images/s", per_second=True), rounds=9)


if __name__ == "__main__":
    main(argument("data_dir", existing_folder))
