"""Loads an optimizer's state without changing dtypes or this session's settings, and restores layouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain, repeat
from typing import Any

import torch
from torch.optim import Optimizer


def load_keeping_flags(
    optimizer: Optimizer, state: Mapping[str, Any], kept: Collection[str] | None = None, same_dtypes: bool = False
) -> None:
    """Restore an optimizer's state, but keep settings of this session, such as the weight decay.

    Args:
        kept: Keys of the parameter groups that keep this session's values; None: all.
        same_dtypes: Whether the parameters have the dtypes that they had when the state was saved. If not, torch
            converts the state to those of the parameters.
    """
    configured = [
        {key: value for key, value in group.items() if key != "params" and (kept is None or key in kept)}
        for group in optimizer.param_groups
    ]
    # Also set them in the loaded state: `fused` determines the device of Adam's step count.
    pairs = zip(state["param_groups"], chain(configured, repeat({})), strict=False)  # torch compares the numbers
    whole = {**state, "param_groups": [{**group, **values} for group, values in pairs]}
    if same_dtypes:
        load_optimizer_state(optimizer, whole, keep_devices=False)
    else:
        optimizer.load_state_dict(whole)
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
    restore_layouts(stepping(optimizer))


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], keep_devices: bool = True) -> None:
    """Load a state dict into an optimizer whose parameters have the dtypes of those that it was saved with.

    `Optimizer.load_state_dict` converts tensors to the dtype and device of their parameter. This rounds, for example,
    momentum that an optimizer keeps in float32 for bfloat16 weights. `keep_devices`: tensors keep their devices, too.
    """
    optimizer.load_state_dict(dict(state))
    saved = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, parameter in zip(saved, parameters, strict=True):
        if index in state["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], state["state"][index], keep_devices)


def _as_saved(loaded: Any, saved: Any, keep_devices: bool) -> Any:
    """Return a loaded value with the dtypes, and the devices if they are kept, of the saved one."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        if loaded.shape != saved.shape:  # the optimizer stores its state in another form
            return loaded
        device = saved.device if keep_devices else loaded.device
        return loaded if (loaded.dtype, loaded.device) == (saved.dtype, device) else saved.to(device, copy=True)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        for key in loaded.keys() & saved.keys():
            loaded[key] = _as_saved(loaded[key], saved[key], keep_devices)
        return loaded
    if type(loaded) in (list, tuple) and type(saved) is type(loaded) and len(loaded) == len(saved):
        return type(loaded)(_as_saved(*pair, keep_devices) for pair in zip(loaded, saved, strict=True))
    return saved if isinstance(saved, str) else loaded  # torch takes strings for sequences


def restore_layouts(optimizer: Optimizer) -> None:
    """Give the state the memory layout of its parameters: checkpoints are contiguous, and fused steps read memory."""
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            of_weights = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if of_weights and value.stride() != parameter.stride():
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def stepping(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer, or the inner one of a ZeroRedundancyOptimizer."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer
