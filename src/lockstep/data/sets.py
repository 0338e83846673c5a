"""Data sets: two splits, class names, the input that a model gets, and the batch of a step. Without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from lockstep.errors import ConfigError, DataError, first_line
from lockstep.files.untrusted import open_plain, read_bytes

if TYPE_CHECKING:
    import torch

MAX_IMAGE_BYTES = 1 << 30
MAX_CLASSES = 1 << 20  # each has a name in memory and in checkpoints


@dataclass(frozen=True)
class InputSpec:
    """A model's input: `channels` x `height` x `width`, with pixels (0 to 1) normalized by `mean` and `std`.

    `crop_ratio` is the side of the center crop in evaluation, relative to the short side of the resized image. Gray
    images of more than 8 bits have values below `2**bits`; None: below `2**16`, clipped.
    """

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_ratio: float = 1.0
    bits: int | None = None


NO_IMAGES = InputSpec(0, 0, 0, (), ())
"""The input of a model that takes something else."""


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


Collate = Callable[[list[Any]], tuple[Any, Any]]
"""Maps a list of N items to (inputs, targets): tensors [N, ...], or mappings, tuples and lists of them."""


@dataclass(frozen=True)
class UserSplit:
    """A custom map-style data set of pairs (inputs, target).

    Floating-point images are used unchanged; uint8 images are scaled to 0 to 1.

    Args:
        classes: Targets are integers from 0 to `classes` - 1; 0: they are anything else.
        collate: Makes a batch of items; None: torch's `default_collate`.
    """

    dataset: Any
    classes: int = MAX_CLASSES
    collate: Collate | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def batch_of(self, items: list[Any]) -> tuple[Any, Any]:
        """Return inputs and targets of N items: nested tensors [N, ...]. With classes, targets are a sequence of N.

        Raises:
            ValueError: The items do not make a batch.
        """
        batch = _collate_pairs(items, bool(self.classes)) if self.collate is None else self.collate(items)
        if not _is_pair(batch):
            raise ValueError(f"collate_fn= returned {_form(batch)}, not (inputs, targets)")
        _check_rows(batch[0] if self.classes and self.collate is None else batch, len(items))
        return batch[0], batch[1]


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _collate_pairs(items: list[Any], has_classes: bool) -> tuple[Any, Any]:
    from torch.utils.data import default_collate

    if not all(map(_is_pair, items)):
        raise ValueError("an item is not a pair")
    inputs, targets = map(list, zip(*items, strict=True))
    try:
        return default_collate(inputs), targets if has_classes else default_collate(targets)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise ValueError(first_line(error)) from None


def _check_rows(batch: Any, count: int) -> None:
    """Check that a batch consists of tensors with a row for each of its `count` items."""
    from lockstep.models.nested import leaves

    for leaf in leaves(batch):
        if not _is_tensor(leaf):
            raise ValueError(f"found {_form(leaf)} instead of a tensor")
        if not leaf.ndim or len(leaf) != count:
            raise ValueError(f"a tensor of shape {list(leaf.shape)} is not a batch of {count}")


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
        classes: Names of the classes; empty if the targets are not classes.
        input: `NO_IMAGES` if the inputs are not images.
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

    @property
    def has_images(self) -> bool:
        return self.input != NO_IMAGES

    @property
    def noun(self) -> str:
        """What its items are called."""
        return "images" if self.has_images else "samples"


class Batch(NamedTuple):
    """Images, floating [N, C, H, W], and labels, int64 [N]; of custom data sets, any nested tensors [N, ...].

    `weights` [N] is None if every sample has weight 1. For mixed images, `labels` are the labels with the larger share,
    `shares` [N] are these shares (at least 1/2), and `others` [N] the labels of the rest. Both are None without mixing.
    """

    images: Any
    labels: Any
    weights: torch.Tensor | None = None
    others: torch.Tensor | None = None
    shares: torch.Tensor | None = None


def describe_custom(
    name: str, train: Any, val: Any, has_loss: bool | None = None, collate: Collate | None = None
) -> ImageData:
    """Wrap two map-style data sets of pairs (inputs, target).

    Inputs are images if they are a tensor [C, H, W], floating or uint8. Targets are classes if the first is an integer.
    Class names are `train.classes`; without it, the numbers from 0 to the largest label of both sets.

    Args:
        has_loss: Whether the user gives a loss, so that targets need not be classes; None: only images with classes.

    Raises:
        DataError: A set has no length or no items, or its items have another form. Without class names, all labels are
            checked; with them, only the first of each set, and the others when they are loaded.
        ConfigError: The targets need a loss.
    """
    splits = {"training": UserSplit(train, collate=collate), "validation": UserSplit(val, collate=collate)}
    for role, dataset in (("training", train), ("validation", val)):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"{name}: the {role} set needs __len__ and __getitem__; its type is {type(dataset).__name__}"
            )
        if len(dataset) == 0:
            raise DataError(f"{name}: the {role} set is empty")
    inputs, target = _item(name, "training", splits["training"], 0, only_images=has_loss is None)
    classes: tuple[str, ...] = ()
    if not has_loss or _is_integer(target):
        try:
            class_index(target, MAX_CLASSES)
        except ValueError as error:
            if has_loss is False:
                raise ConfigError(
                    f"{name}: item 0 of the training set has {error}; targets that are not classes need loss=, a "
                    f"function of (outputs, targets)"
                ) from None
        classes = _find_classes(name, splits, only_images=has_loss is None)
    train_split, val_split = (replace(split, classes=len(classes)) for split in splits.values())
    if not classes:
        _item(name, "training", train_split, 0)
        _item(name, "validation", val_split, 0)
    return ImageData(name, classes, train_split, val_split, _spec_of(inputs, whatever_dtype=has_loss is None))


def _find_classes(name: str, splits: Mapping[str, UserSplit], only_images: bool) -> tuple[str, ...]:
    """Return the names of the classes, after reading as many items as needed."""
    names, largest = _classes_of(splits["training"].dataset), 0
    limit = MAX_CLASSES if names is None else len(names)
    for role, split in splits.items():
        for index in range(len(split) if names is None else 1):
            _, label = _item(name, role, split, index, only_images)
            try:
                largest = max(largest, class_index(label, limit))
            except ValueError as error:
                raise DataError(f"{name}: item {index} of the {role} set has {error}") from None
    return tuple(map(str, range(largest + 1) if names is None else names))


def _classes_of(dataset: Any) -> Any:
    """Return `dataset.classes`; for a torch Subset, those of the underlying data set."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, "classes", None)


def _item(name: str, role: str, split: UserSplit, index: int, only_images: bool = False) -> tuple[Any, Any]:
    """Return an item's inputs, as a batch of one, and its target.

    Raises:
        DataError: The item has another form.
    """
    item = split.dataset[index]
    wanted = "(image tensor [C, H, W], label)" if only_images else "(inputs, target), or become that by collate_fn="
    try:
        inputs, targets = split.batch_of([item])
        if only_images and not (_is_tensor(item[0]) and item[0].ndim == 3):
            raise ValueError("the inputs are not an image")
        return inputs, targets[0] if split.classes and not isinstance(targets, Mapping) else targets
    except ValueError as error:
        raise DataError(
            f"{name}: items must be {wanted}; item {index} of the {role} set is {_form(item)} ({error}); to train on "
            f"other items, keep your own loop (docs/howto/own-loop.md)"
        ) from None


def _spec_of(inputs: Any, whatever_dtype: bool) -> InputSpec:
    """Return the specification of a batch of inputs."""
    import torch

    if not (isinstance(inputs, torch.Tensor) and inputs.ndim == 4):
        return NO_IMAGES
    if not (whatever_dtype or inputs.is_floating_point() or inputs.dtype == torch.uint8):
        return NO_IMAGES
    _, channels, height, width = inputs.shape
    return InputSpec(channels, height, width, (0.0,) * channels, (1.0,) * channels)


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_integer(target: Any) -> bool:
    if hasattr(target, "dtype"):  # of torch or NumPy
        return not target.shape and str(target.dtype).rpartition(".")[2].startswith(("int", "uint", "bool"))
    return isinstance(target, int)


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
