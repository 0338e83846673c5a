"""Small public data sets, downloaded and checked by torchvision and held in memory as uint8 tensors."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.errors import DataError, first_line
from lockstep.files.untrusted import read_bytes

MAX_BYTES = 1 << 30  # per file; CIFAR-100's training images take 155 million

_MNIST = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}
_CIFAR = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}
# Per-channel mean and standard deviation of the training images' pixels, scaled to 0 to 1.
_STATISTICS = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def load(name: str, root: Path, download: bool) -> ImageData:
    """Load a data set from `root`, after downloading it if it is missing and `download` is set.

    Raises:
        DataError: It is missing and was not downloaded, or a file is damaged.
    """
    read = _read_mnist if name in _MNIST else _read_cifar
    try:
        train, val, classes = read(name, root, download)
    except DataError:
        raise
    except (RuntimeError, OSError, ValueError, AssertionError) as error:  # the last two: damaged files
        raise DataError(
            f"{name} is missing from {root} or damaged ({first_line(error)}); "
            f"download it on a machine with network access: `lockstep data get {name} --data-dir {root}`, "
            f"or pass the folder that contains it with --data-dir"
        ) from error
    channels, height, width = train.images.shape[1:]
    mean, std = _STATISTICS[name]
    return ImageData(name, classes, train, val, InputSpec(channels, height, width, mean, std))


def _read_mnist(name: str, root: Path, download: bool) -> tuple[MemorySplit, MemorySplit, tuple[str, ...]]:
    kind: Any = _MNIST[name]
    # torchvision unpacks only with download=True, which needs no network if the archives are present.
    raw = root / kind.__name__ / "raw"
    archived = all(check_integrity(str(raw / archive), md5) for archive, md5 in kind.resources)
    splits = []
    for train in (True, False):
        split = kind(root, train=train, download=download or archived)
        splits.append(MemorySplit(split.data.unsqueeze(1), split.targets))
    names = tuple(label.split(" - ")[0] if name == "mnist" else label for label in kind.classes)
    return splits[0], splits[1], names


def _read_cifar(name: str, root: Path, download: bool) -> tuple[MemorySplit, MemorySplit, tuple[str, ...]]:
    kind: Any = _CIFAR[name]
    folder = root / kind.base_folder
    wanted = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    try:
        contents = _unpickled(folder, wanted)
    except (OSError, RuntimeError, DataError):
        if not download:
            raise RuntimeError("a file is missing or damaged") from None
        datasets.utils.download_and_extract_archive(kind.url, root, filename=kind.filename, md5=kind.tgz_md5)
        contents = _unpickled(folder, wanted)
    classes = contents[kind.meta["filename"]][kind.meta["key"]]
    train, val = (_join_batches([contents[file] for file, _ in part]) for part in (kind.train_list, kind.test_list))
    return train, val, tuple(classes)


def _unpickled(folder: Path, files: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Unpickle CIFAR's files. Pickles can execute code, so each file must match its official MD5."""
    contents = {}
    for name, md5 in files:
        content = read_bytes(folder / name, MAX_BYTES)
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
            raise RuntimeError(f"{name} is damaged")
        contents[name] = pickle.loads(content, encoding="latin1")
    return contents


def _join_batches(contents: Sequence[Mapping[str, Any]]) -> MemorySplit:
    pixels = np.concatenate([content["data"] for content in contents]).reshape(-1, 3, 32, 32)
    labels = [label for content in contents for label in content.get("labels") or content["fine_labels"]]
    return MemorySplit(torch.from_numpy(pixels), torch.tensor(labels, dtype=torch.int64, device="cpu"))
