"""Nested tensors, as data sets, models and losses use them: a tensor, or mappings, tuples and lists of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import torch


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def map_tensors(function: Callable[[Any], Any], value: Any, is_tensor: Callable[[Any], bool] = _is_tensor) -> Any:
    """Return a copy of `value` with `function` applied to each tensor; other objects stay.

    Args:
        is_tensor: What is passed to `function`, instead of tensors alone.
    """
    if is_tensor(value):
        return function(value)
    if isinstance(value, Mapping):
        mapped: Any = copy(value)  # keeps the type, such as a model's output with attributes
        for key in value:
            mapped[key] = map_tensors(function, value[key], is_tensor)
        return mapped
    if isinstance(value, tuple | list):
        parts = [map_tensors(function, part, is_tensor) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors in `value`, and other objects in their place."""
    if isinstance(value, Mapping | tuple | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(part)
    else:
        yield value


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating-point tensors in `dtype`; integers, such as numbers of tokens, stay."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
