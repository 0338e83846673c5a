"""Copy small arrays to the device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from lockstep.world import accelerator


def send(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device; to a GPU, asynchronously from pinned memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if accelerator.overlaps(device) else tensor.to(device)
