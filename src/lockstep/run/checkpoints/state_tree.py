"""Split a state, such as a state_dict, into JSON values and named tensors, and join them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lockstep.run.checkpoints.snapshot import TensorShard

Tensors = dict[str, Any]
"""Tensors, also sharded or stored ones."""
# A mapping with one of these as its only key stands for a tensor, a mapping with other keys, or a tuple.
TENSOR, PAIRS, TUPLE = "tensor of this name", "pairs", "tuple"
MARKS = ({TENSOR}, {PAIRS}, {TUPLE})


def split(value: Any, key: str, tensors: Tensors) -> Any:
    """Return a state as JSON values; its tensors are added to `tensors` as they are, by their place: KEY.NAME.INDEX.

    Raises:
        TypeError: A value can be neither; the message says where it is.
    """
    if isinstance(value, torch.Tensor | TensorShard):
        while key in tensors:  # such as "a.b" in one mapping and "b" in its "a"
            key += "_"
        tensors[key] = value
        return {TENSOR: key}
    prefix = f"{key}." if key else ""
    if isinstance(value, Mapping):
        parts = {name: split(each, f"{prefix}{name}", tensors) for name, each in value.items()}
        if all(isinstance(name, str) for name in parts) and parts.keys() not in MARKS:
            return parts
        for name in parts:
            _check(name, f"a key of {key or 'the state'}")
        return {PAIRS: [[name, each] for name, each in parts.items()]}
    if isinstance(value, list | tuple):
        items = [split(each, f"{prefix}{index}", tensors) for index, each in enumerate(value)]
        return items if isinstance(value, list) else {TUPLE: items}
    _check(value, key)
    return value


def _check(value: Any, where: str) -> None:
    if not (value is None or isinstance(value, bool | int | float | str)):
        fix = " of NumPy (convert it with .item())" if isinstance(value, np.generic) else ""
        raise TypeError(f"{where} is a {type(value).__name__}{fix}")
    if isinstance(value, int) and value.bit_length() > 63:  # such as in the state of a NumPy generator
        raise TypeError(f"{where} is an integer of more than 64 bits")


def join(value: Any, tensors: Tensors) -> Any:
    """Undo `split`.

    Raises:
        KeyError, TypeError, ValueError: The values are not from `split`, or a tensor is missing.
    """
    if isinstance(value, list):
        return [join(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        return tensors[value[TENSOR]]
    if value.keys() == {TUPLE}:
        return tuple(join(each, tensors) for each in value[TUPLE])
    if value.keys() == {PAIRS}:
        return {name: join(each, tensors) for name, each in value[PAIRS]}
    return {name: join(each, tensors) for name, each in value.items()}
