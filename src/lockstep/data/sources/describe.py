"""Facts about a data set on disk, for `lockstep data info`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.data.packed.pack_reader import SPLITS, Manifest, PackedSplit, is_packed, splits
from lockstep.data.pipeline.image_header import header
from lockstep.data.sets import EncodedSplit, FileSplit
from lockstep.data.sources.folder_listing import list_images
from lockstep.errors import DataError

SAMPLED = 500


@dataclass(frozen=True)
class SplitFacts:
    """Facts about one split: exact counts, and statistics of the headers of up to `SAMPLED` evenly spaced images."""

    name: str
    samples: int
    size_bytes: int
    shards: int
    class_sizes: tuple[int, int]  # images of the smallest and of the largest class
    looked_at: int
    unreadable: int
    forms: Counter[str]
    short_sides: tuple[int, int, int]  # smallest, median, largest
    long_sides: tuple[int, int, int]


@dataclass(frozen=True)
class SetFacts:
    """Facts about a data set; `manifest` is None for a folder of images."""

    classes: tuple[str, ...]
    manifest: Manifest | None
    splits: tuple[SplitFacts, ...]


def describe(path: Path) -> SetFacts:
    """Gather facts about a folder or a pack.

    Raises:
        DataError: `path` is neither, or is damaged.
    """
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; pass a folder with train/ and val/, or a pack")
    manifest = Manifest.read(path) if is_packed(path) else None
    parts: Sequence[EncodedSplit]
    if manifest:
        classes, parts = manifest.classes, splits(path, manifest)
    else:
        classes, *parts = list_images(path)
    facts = tuple(_describe_split(name, part, len(classes)) for name, part in zip(SPLITS, parts, strict=True))
    return SetFacts(classes, manifest, facts)


def _describe_split(name: str, split: EncodedSplit, classes: int) -> SplitFacts:
    counts = np.bincount(np.asarray(split.labels), minlength=classes)
    samples = np.unique(np.linspace(0, len(split) - 1, min(len(split), SAMPLED)).astype(int))
    headers = [found for sample in samples.tolist() if (found := header(split, sample))]
    shards = len(split.shards) if isinstance(split, PackedSplit) else 0
    return SplitFacts(
        name,
        len(split),
        _size_bytes(split),
        shards,
        (int(counts.min()), int(counts.max())),
        len(samples),
        len(samples) - len(headers),
        Counter(each.form for each in headers),
        _spread([min(each.size) for each in headers]),
        _spread([max(each.size) for each in headers]),
    )


def _size_bytes(split: EncodedSplit) -> int:
    if isinstance(split, PackedSplit):
        return int(split.index["length"].sum(dtype=np.int64))
    assert isinstance(split, FileSplit)
    return sum(path.stat().st_size for path in split.paths if path.exists())  # a link may be dangling


def _spread(sides: Sequence[int]) -> tuple[int, int, int]:
    ordered = sorted(sides) or [0]
    return ordered[0], ordered[len(ordered) // 2], ordered[-1]
