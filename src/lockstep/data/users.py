"""The user's own data sets: what Lockstep needs to know of them, read from their first item."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.data.sets import ImageData, InputSpec, UserSplit
from lockstep.errors import DataError


def describe(name: str, train: Any, val: Any) -> ImageData:
    """Wrap two map-style data sets whose items are (image tensor [C, H, W], label).

    Class names are taken from `train.classes`; without it they are the numbers up to the largest label in both sets.

    Raises:
        DataError: A set has no length or no items, or its items are of another form.
    """
    for role, dataset in (("training", train), ("validation", val)):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(f"{name}: the {role} set needs __len__ and __getitem__; it is {type(dataset).__name__}")
        if len(dataset) == 0:
            raise DataError(f"{name}: the {role} set is empty")
    image = train[0][0] if isinstance(train[0], tuple | list) and len(train[0]) == 2 else None
    if not isinstance(image, torch.Tensor) or image.ndim != 3:
        raise DataError(f"{name}: items must be (image tensor [C, H, W], label); item 0 is {train[0]!r:.200}")
    classes = getattr(train, "classes", None)
    if classes is None:
        largest = max(int(dataset[index][1]) for dataset in (train, val) for index in range(len(dataset)))
        classes = [str(number) for number in range(largest + 1)]
    channels, height, width = image.shape
    spec = InputSpec(channels, height, width, (0.0,) * channels, (1.0,) * channels)
    return ImageData(name, tuple(map(str, classes)), UserSplit(train), UserSplit(val), spec)
