"""Metadata of a weights file. Files are untrusted, so types and sizes are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.data.sets import InputSpec

MOST_CLASSES = 1_000_000  # 4 MB of logits per image
MOST_SIDE = 16_384  # pixels
MOST_CHANNELS = 1_024


@dataclass(frozen=True)
class About:
    """Architecture, class names, input, and the data set that it was trained on."""

    arch: str
    classes: tuple[str, ...]
    input: InputSpec
    data: str = ""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> About:
        """Parse the metadata of an exported file or a checkpoint.

        Raises:
            KeyError, TypeError, ValueError: A value is missing, of the wrong type, or out of range.
        """
        classes, data = values["classes"], values.get("data", "")
        if not (isinstance(values["arch"], str) and isinstance(data, str)):
            raise TypeError("arch or data is not a string")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise TypeError("classes is not a list of strings")
        if not 1 <= len(classes) <= MOST_CLASSES:
            raise ValueError(f"{len(classes):,} classes; expected 1 to {MOST_CLASSES:,}")
        return cls(values["arch"], tuple(classes), _input(values["input"]), data)


def _input(values: Mapping[str, Any]) -> InputSpec:
    if not isinstance(values, Mapping) or not all(isinstance(values[name], list) for name in ("mean", "std")):
        raise TypeError("input is not a mapping with lists mean and std")
    spec = InputSpec(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})
    for name, most in (("channels", MOST_CHANNELS), ("height", MOST_SIDE), ("width", MOST_SIDE)):
        value = getattr(spec, name)
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"invalid input {name}: {str(value)[:40]}")
    figures = (*spec.mean, *spec.std, spec.crop_ratio)
    if not all(type(figure) in (int, float) and abs(figure) < math.inf for figure in figures):
        raise ValueError("mean, std or crop_ratio is not a number")
    if not len(spec.mean) == len(spec.std) == spec.channels or not all(spec.std) or not 0 < spec.crop_ratio <= 1:
        raise ValueError(f"invalid mean, std or crop_ratio: {spec.mean}, {spec.std}, {spec.crop_ratio}"[:200])
    return spec
