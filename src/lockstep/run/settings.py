"""The settings in a script that a resume compares with those of the run: the order of samples, classes, rates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep.data.exact_loader import ExactLoader
from lockstep.data.shares import Shares

DERIVED = ("params", "initial_lr", "base_lrs")  # the last two follow from lr


def order_of(loader: ExactLoader) -> str:
    """Return the arguments of a training loader that choose the order of an epoch. Collective if it has a sampler."""
    shares = loader.shares
    assert isinstance(shares, Shares)
    if shares.sampler is None:
        return f"shuffle={shares.shuffle}"
    digest = hashlib.sha256(shares.order(0).tobytes()).hexdigest()[:8]
    return f"sampler={type(shares.sampler).__name__} (order {digest})"


def classes_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the classes of the states; models are compared by their tensors."""
    others = {name: each for name, each in state.items() if not isinstance(each, nn.Module)}
    return {f"class of {name}": type(each).__name__ for name, each in others.items()}


def settings_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, as JSON, with which a script has made optimizers, schedulers and a GradScaler."""
    return {name: value for name, each in state.items() for name, value in _settings(name, each)}


def _settings(name: str, each: Any) -> Iterator[tuple[str, Any]]:
    groups: Sequence[Mapping[str, Any]] = ()
    if isinstance(each, torch.optim.Optimizer):
        groups = each.param_groups
    elif isinstance(each, LRScheduler | torch.amp.GradScaler):
        groups = [each.state_dict()]
    for index, group in enumerate(groups):
        prefix = f"{name}: " if len(groups) == 1 else f"{name}: group {index}: "
        for key, value in group.items():
            number = value.tolist() if isinstance(value, torch.Tensor) else value
            if key not in DERIVED and not key.startswith("_") and _is_plain(number):
                yield prefix + key, json.loads(json.dumps(number))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def describe_overridden(own: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that a script was resumed with, and for which the checkpoint's was taken."""
    return [
        f"{name}={own[name]} is not used, but the checkpoint's state, which began with {stored[name]}; to change it, "
        f"set it after world.run()"
        for name in own
        if name in stored and stored[name] != own[name]
    ]
