"""The way of small arrays to the device, where samples are picked and changed."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from lockstep.world import accelerator


def send(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The same values on a device; a GPU's copy is made from pinned memory, and nobody waits for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if accelerator.overlaps(device) else tensor.to(device)
