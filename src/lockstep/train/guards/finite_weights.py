"""Whether weights are still numbers, asked of all workers, so that all go on or none."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.world.world import World


def are_finite(world: World, weights: nn.Module) -> bool:
    """Whether every parameter on every worker is finite. Call it on all workers; one wait for the device."""
    flags = [parameter.isfinite().all().to(world.device, non_blocking=True) for parameter in weights.parameters()]
    if not flags:
        return True
    return not world.max_((~torch.stack(flags)).any().to(torch.int32).reshape(1)).item()
