"""WebDataset over tar files of a folder's photographs: webdataset_pipeline.py FOLDER BATCH PROCESSES PASSES."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import webdataset
from torchvision import datasets, transforms
from turns import take_turns

SHARDS = 4
folder, batch, processes, passes = sys.argv[1], *map(int, sys.argv[2:])
transform = transforms.Compose(
    [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)


def write(samples: list[tuple[str, int]], path: str) -> str:
    with webdataset.TarWriter(path) as shard:
        for number, (image, label) in enumerate(samples):
            shard.write({"__key__": f"{number:06d}", "jpg": Path(image).read_bytes(), "cls": label})
    return path


with tempfile.TemporaryDirectory() as scratch:
    samples = datasets.ImageFolder(f"{folder}/train").samples
    shards = [write(samples[part::SHARDS], f"{scratch}/{part}.tar") for part in range(SHARDS)]
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=SHARDS)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transform, lambda label: label)
        .batched(batch)
    )
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=processes, persistent_workers=True)
    take_turns(lambda: sum(len(labels) for _ in range(passes) for _, labels in loader))
