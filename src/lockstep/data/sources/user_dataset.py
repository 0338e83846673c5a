"""Custom data sets, described by their first item."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.data.sets import MAX_CLASSES, ImageData, InputSpec, UserSplit, class_index
from lockstep.errors import DataError


def describe(name: str, train: Any, val: Any) -> ImageData:
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
    if isinstance(item, torch.Tensor):
        return f"a tensor {list(item.shape)}"
    if isinstance(item, dict):
        return f"a dict with the keys {', '.join(map(repr, item))}"[:200]
    if isinstance(item, tuple | list):
        return f"({', '.join(_form(part) for part in item[:8])}{', ...' if len(item) > 8 else ''})"
    return type(item).__name__
