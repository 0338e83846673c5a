"""What a data set is here: two splits, the names of its classes, and how its pixels become a model's input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from lockstep.files.untrusted import open_plain, read_bytes

if TYPE_CHECKING:  # processes that only move files need no torch
    import torch


MOST_IMAGE_BYTES = 1 << 30


@dataclass(frozen=True)
class InputSpec:
    """A model's input: `channels` x `height` x `width`, with pixels (0 to 1) normalised by `mean` and `std`.

    `crop_ratio` is the side of evaluation's centre crop over the resized image's short side.
    """

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_ratio: float = 1.0


@dataclass(frozen=True)
class MemorySplit:
    """Images held in memory: uint8 [N, C, H, W], labels int64 [N]; `source`: the files that they were decoded from."""

    images: torch.Tensor
    labels: torch.Tensor
    source: EncodedSplit | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.labels)


class ImageFile(Protocol):
    """An encoded image: a Path is one, an image of a split another. As a string it is its place, for messages."""

    def read_bytes(self) -> bytes | memoryview:
        """The file as it is: JPEG, PNG, WebP or another of the forms of `lockstep.data.pipeline.image_header`.

        Raises:
            OSError: It cannot be read.
        """


class EncodedSplit(ABC):
    """Images that are read and decoded when they are needed."""

    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, sample: int) -> str:
        """Where an image lies, for messages."""

    @abstractmethod
    def read(self, sample: int) -> bytes | memoryview:
        """An image's file, as it is.

        Raises:
            OSError: It cannot be read.
        """

    def open(self, sample: int) -> BinaryIO:
        """An image's file, to read a part of it."""
        return BytesIO(self.read(sample))

    def image(self, sample: int) -> ImageFile:
        return _ImageOfSplit(self, sample)


@dataclass(frozen=True)
class _ImageOfSplit:
    """Its place is looked up only for a message, for that takes a pack as long as reading."""

    split: EncodedSplit
    sample: int

    def read_bytes(self) -> bytes | memoryview:
        return self.split.read(self.sample)

    def __str__(self) -> str:
        return self.split.name(self.sample)


@dataclass(frozen=True)
class FileSplit(EncodedSplit):
    """Images in a file each; `ignored` counts the files beside them that are no images, by extension."""

    paths: Sequence[Path]
    labels: Sequence[int]
    ignored: Mapping[str, int] = field(default_factory=dict)

    def name(self, sample: int) -> str:
        return str(self.paths[sample])

    def read(self, sample: int) -> bytes:
        return read_bytes(self.paths[sample], MOST_IMAGE_BYTES)

    def open(self, sample: int) -> BinaryIO:
        return open_plain(self.paths[sample])


@dataclass(frozen=True)
class UserSplit:
    """The user's own map-style data set: item i is (image [C, H, W], label).

    Floating images are taken as they are; uint8 images are scaled to 0 to 1.
    """

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)


Split = MemorySplit | EncodedSplit | UserSplit


@dataclass(frozen=True)
class ImageData:
    """A data set ready for training.

    Attributes:
        left_out: The files that could not be decoded and were skipped.
        notes: Lines on what the user may not expect of this data set.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    input: InputSpec
    left_out: list[str] = field(default_factory=list)
    notes: Sequence[str] = ()
