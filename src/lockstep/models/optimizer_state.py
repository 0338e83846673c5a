"""Loads an optimizer's state without changing the dtypes of its tensors, and restores their layouts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], keep_devices: bool = True) -> None:
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


def restore_layouts(optimizer: torch.optim.Optimizer) -> None:
    """Give the state the memory layout of its parameters: checkpoints are contiguous, and fused steps read memory."""
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            of_weights = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if of_weights and value.stride() != parameter.stride():
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
