"""Custom data sets, described by their first item."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.data.sets import ImageData, InputSpec, UserSplit
from lockstep.errors import DataError


def describe(name: str, train: Any, val: Any) -> ImageData:
    """Wrap two map-style data sets whose items are (image tensor [C, H, W], label).

    Class names are `train.classes`; without it, the numbers from 0 to the largest label of both sets.

    Raises:
        DataError: A set has no length or no items, or its items have another form.
    """
    for role, dataset in (("training", train), ("validation", val)):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"{name}: the {role} set needs __len__ and __getitem__; its type is {type(dataset).__name__}"
            )
        if len(dataset) == 0:
            raise DataError(f"{name}: the {role} set is empty")
    image, _ = _item(name, "training", train, 0)
    _item(name, "validation", val, 0)
    classes = _classes_of(train)
    if classes is None:
        largest = max(
            _item(name, role, dataset, index)[1]
            for role, dataset in (("training", train), ("validation", val))
            for index in range(len(dataset))
        )
        classes = [str(number) for number in range(largest + 1)]
    channels, height, width = image.shape
    spec = InputSpec(channels, height, width, (0.0,) * channels, (1.0,) * channels)
    return ImageData(name, tuple(map(str, classes)), UserSplit(train), UserSplit(val), spec)


def _classes_of(dataset: Any) -> Any:
    """Return `dataset.classes`; for a torch Subset, those of the underlying data set."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, "classes", None)


def _item(name: str, role: str, dataset: Any, index: int) -> tuple[torch.Tensor, int]:
    item = dataset[index]
    try:
        image, label = item
        if isinstance(image, torch.Tensor) and image.ndim == 3:
            return image, int(label)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise DataError(
        f"{name}: items must be (image tensor [C, H, W], label); item {index} of the {role} set is {item!r:.200}"
    )
