"""Check on all workers together that weights are finite."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.world.world import World


def are_finite(world: World, weights: nn.Module) -> bool:
    """Return whether all parameters on all workers are finite. Collective; waits once for the device."""
    flags = [parameter.isfinite().all().to(world.device, non_blocking=True) for parameter in weights.parameters()]
    if not flags:
        return True
    return not world.max_((~torch.stack(flags)).any().to(torch.int32).reshape(1)).item()
