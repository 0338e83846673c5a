"""Keep the memory of freed tensors on a CPU for the next step, instead of returning it to the system.

By default, glibc returns large freed blocks to the system. The next step allocates them again, and the system must zero
their pages. This takes 5 to 20 % of the time of a training step with large activations.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # M_TRIM_THRESHOLD and so on, of mallopt(3)
KEEP = {TRIM_THRESHOLD: -1, MMAP_MAX: 0}
# What glibc itself reaches after a program has freed a block of 32 MiB, and its default number of mapped blocks.
RETURN = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20, MMAP_MAX: 65_536}
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(device: torch.device) -> None:
    """Keep what this process frees, if it computes on a CPU and no variable configures glibc's malloc."""
    if device.type == "cpu":
        _configure(KEEP)


def return_freed_memory() -> None:
    """Return freed memory to the system again, in a loader process, whose parent may keep it."""
    _configure(RETURN)


def _configure(settings: dict[int, int]) -> None:
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name in os.environ for name in MALLOC_VARIABLES):
        for setting, value in settings.items():
            libc.mallopt(setting, value)
