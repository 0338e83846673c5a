"""CIFAR-10 for the suite, as original files or as a folder of images, with a name that says which images they are."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from gpu.suite import is_original
from lockstep.config.schema import DataConfig
from lockstep.data import catalog
from lockstep.data.sets import ImageData, MemorySplit
from lockstep.data.sources import torchvision_sets

JPEG_COPY = "a JPEG copy of CIFAR-10, on which networks are less accurate than on the original"


def load(folder: Path) -> tuple[ImageData, str]:
    """Load CIFAR-10 into memory, and return its name for the records."""
    start = time.perf_counter()
    if is_original(folder):
        data, name = torchvision_sets.load("cifar10", folder, download=False), "the original CIFAR-10, by its MD5 sums"
    else:
        data = catalog.load(DataConfig(dataset=str(folder), in_memory="always"))
        is_jpeg = next((folder / "train").rglob("*.jp*g"), None) is not None
        name = f"{JPEG_COPY if is_jpeg else 'lossless images of CIFAR-10'} (SHA-256 of the pixels {_digest(data)})"
    seconds = time.perf_counter() - start
    print(f"{len(data.train):,} + {len(data.val):,} images loaded in {seconds:.0f} s: {name}", flush=True)
    return data, name


def _digest(data: ImageData) -> str:
    """Return the start of a digest of the images, which does not depend on their order in the folder's classes."""
    digests = []
    for split in (data.train, data.val):
        assert isinstance(split, MemorySplit)
        pairs = zip(split.images.numpy(), split.labels.tolist(), strict=True)
        each = (hashlib.sha256(pixels.tobytes() + bytes([label])).digest() for pixels, label in pairs)
        digests.append(b"".join(sorted(each)))
    return hashlib.sha256(b"".join(digests)).hexdigest()[:12]
