"""Data sets: two splits, class names, the input that a model gets, and the batch of a step. Without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from lockstep.errors import DataError
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
        """Return the encoded file: JPEG, PNG, WebP or another of `lockstep.data.decode.FORMS`.

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


def describe_custom(name: str, train: Any, val: Any) -> ImageData:
    """Wrap two map-style data sets whose items are (image tensor [C, H, W], label).

    Class names are `train.classes`; without it, the numbers from 0 to the largest label of both sets.

    Raises:
        DataError: A set has no length or no items, or its items have another form. Without class names, all labels are
            checked; with them, only the first of each set, and the others when they are loaded.
    """
    for role, dataset in (("training", train), ("validation", val)):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"{name}: the {role} set needs __len__ and __getitem__; its type is {type(dataset).__name__}"
            )
        if len(dataset) == 0:
            raise DataError(f"{name}: the {role} set is empty")
    classes = _classes_of(train)
    limit = MAX_CLASSES if classes is None else len(classes)
    image, _ = _item(name, "training", train, 0, limit)
    _item(name, "validation", val, 0, limit)
    if classes is None:
        largest = max(
            _item(name, role, dataset, index, limit)[1]
            for role, dataset in (("training", train), ("validation", val))
            for index in range(len(dataset))
        )
        classes = [str(number) for number in range(largest + 1)]
    channels, height, width = image.shape
    spec = InputSpec(channels, height, width, (0.0,) * channels, (1.0,) * channels)
    splits = UserSplit(train, len(classes)), UserSplit(val, len(classes))
    return ImageData(name, tuple(map(str, classes)), *splits, spec)


def _classes_of(dataset: Any) -> Any:
    """Return `dataset.classes`; for a torch Subset, those of the underlying data set."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, "classes", None)


def _item(name: str, role: str, dataset: Any, index: int, classes: int) -> tuple[torch.Tensor, int]:
    import torch

    item = dataset[index]
    try:
        image, label = item
        is_image = isinstance(image, torch.Tensor) and image.ndim == 3
    except (TypeError, ValueError):
        is_image = False
    if not is_image:
        raise DataError(
            f"{name}: items must be (image tensor [C, H, W], label); item {index} of the {role} set is {_form(item)}; "
            f"to train on other items, keep your own loop (docs/howto/own-loop.md)"
        )
    try:
        return image, class_index(label, classes)
    except ValueError as error:
        raise DataError(f"{name}: item {index} of the {role} set has {error}") from None


def _form(item: Any) -> str:
    """Return an item's types in a few words."""
    import torch

    if isinstance(item, torch.Tensor):
        return f"a tensor {list(item.shape)}"
    if isinstance(item, dict):
        return f"a dict with the keys {', '.join(map(repr, item))}"[:200]
    if isinstance(item, tuple | list):
        return f"({', '.join(_form(part) for part in item[:8])}{', ...' if len(item) > 8 else ''})"
    return type(item).__name__
