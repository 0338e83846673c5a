"""Data sets: two splits, class names, the input that a model gets, and the batch of a step. Without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from lockstep.files.untrusted import open_plain, read_bytes

if TYPE_CHECKING:
    import torch

MAX_IMAGE_BYTES = 1 << 30
MAX_CLASSES = 1 << 20  # each has a name in memory and in checkpoints


@dataclass(frozen=True)
class InputSpec:
    """A model's input: `channels` x `height` x `width`, with pixels (0 to 1) normalized by `mean` and `std`.

    `crop_ratio` is the side of the center crop in evaluation, relative to the short side of the resized image.
    """

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_ratio: float = 1.0


@dataclass(frozen=True)
class MemorySplit:
    """Images in memory: uint8 [N, C, H, W], labels int64 [N]. `source`: the files they were decoded from, if any."""

    images: torch.Tensor
    labels: torch.Tensor
    source: EncodedSplit | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.labels)


class ImageFile(Protocol):
    """An encoded image, such as a Path or an image of a split. `str` gives its location, for messages."""

    def read_bytes(self) -> bytes | memoryview:
        """Return the encoded file: JPEG, PNG, WebP or another of `lockstep.data.pipeline.decode.FORMS`.

        Raises:
            OSError: The file cannot be read.
        """


class EncodedSplit(ABC):
    """Images that are read and decoded on demand."""

    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, sample: int) -> str:
        """Return the location of an image, for messages."""

    @abstractmethod
    def read(self, sample: int) -> bytes | memoryview:
        """Return the encoded file of an image.

        Raises:
            OSError: The file cannot be read.
        """

    def open(self, sample: int) -> BinaryIO:
        """Open an image's file, to read a part of it."""
        return BytesIO(self.read(sample))

    def image(self, sample: int) -> ImageFile:
        return _ImageOfSplit(self, sample)


@dataclass(frozen=True)
class _ImageOfSplit:
    """An image of a split. Its name is computed only for messages: in a pack, that takes as long as reading it."""

    split: EncodedSplit
    sample: int

    def read_bytes(self) -> bytes | memoryview:
        return self.split.read(self.sample)

    def __str__(self) -> str:
        return self.split.name(self.sample)


@dataclass(frozen=True)
class FileSplit(EncodedSplit):
    """One file per image; `ignored` counts the other files in the folder, by extension."""

    paths: Sequence[Path]
    labels: Sequence[int]
    ignored: Mapping[str, int] = field(default_factory=dict)

    def name(self, sample: int) -> str:
        return str(self.paths[sample])

    def read(self, sample: int) -> bytes:
        return read_bytes(self.paths[sample], MAX_IMAGE_BYTES)

    def open(self, sample: int) -> BinaryIO:
        return open_plain(self.paths[sample])


@dataclass(frozen=True)
class UserSplit:
    """A custom map-style data set: item i is (image [C, H, W], label), with labels from 0 to `classes` - 1.

    Floating images are used unchanged; uint8 images are scaled to 0 to 1.
    """

    dataset: Any
    classes: int = MAX_CLASSES

    def __len__(self) -> int:
        return len(self.dataset)


def class_index(label: Any, classes: int) -> int:
    """Return the label of a custom data set as an integer. Any type of number or one-element tensor is accepted.

    Raises:
        ValueError: It is not an integer from 0 to `classes` - 1; the message starts with the label.
    """
    try:
        index = int(label)
        if index == label and 0 <= index < classes:
            return index
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise ValueError(f"label {' '.join(repr(label).split()):.80}: must be an integer from 0 to {classes - 1:,}")


Split = MemorySplit | EncodedSplit | UserSplit


@dataclass(frozen=True)
class ImageData:
    """A data set ready for training.

    Attributes:
        left_out: Files that could not be decoded and were skipped.
        notes: Notes for the user, such as ignored files.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    input: InputSpec
    left_out: list[str] = field(default_factory=list)
    notes: Sequence[str] = ()


class Batch(NamedTuple):
    """Images, floating [N, C, H, W], and labels, int64 [N].

    `weights` [N] is None if every sample has weight 1. For mixed images, `labels` are the labels with the larger share,
    `shares` [N] are these shares (at least 1/2), and `others` [N] the labels of the rest. Both are None without mixing.
    """

    images: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor | None = None
    others: torch.Tensor | None = None
    shares: torch.Tensor | None = None
