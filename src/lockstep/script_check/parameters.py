"""What an optimizer trains and with which settings, and whether this worker trains with others."""

from __future__ import annotations

import sys
from typing import Any

HVD = "lockstep.hvd.basics"


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def managed_by(wrapper: Any, module: Any) -> list[Any]:
    """Return the parameters of a module whose gradients its DistributedDataParallel averages."""
    ignored = wrapper.parameters_to_ignore
    return [each for name, each in module.named_parameters() if each.requires_grad and name not in ignored]


def is_sharded(parameter: Any) -> bool:
    """Whether each worker holds another part of a parameter: FSDP's, or a distributed tensor."""
    return hasattr(parameter, "placements") or hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "_handle")


def settings_of(group: dict[str, Any], with_tensors: bool = True) -> dict[str, Any]:
    """Return the numbers among a group's settings, such as the learning rate.

    Args:
        with_tensors: Include tensors of one number; reading one waits for its device.
    """
    found = {}
    for name, value in group.items():
        if with_tensors and hasattr(value, "item") and getattr(value, "numel", lambda: 0)() == 1:
            value = value.item()
        if isinstance(value, (tuple, list)):
            value = [each for each in value if isinstance(each, (int, float))]
        if isinstance(value, (int, float, list)) and name != "params":
            found[name] = value if value == value else "nan"  # which is not equal to itself
    return found


def is_joined() -> bool:
    """Whether this worker has a process group with others."""
    from torch import distributed

    if has_hvd():
        return int(sys.modules[HVD].size()) > 1
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def has_hvd() -> bool:
    """Whether this program uses hvd; the launcher may have imported its modules for any program."""
    return HVD in sys.modules and bool(sys.modules[HVD].is_initialized())
