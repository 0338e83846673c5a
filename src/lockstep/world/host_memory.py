"""Keep the memory of freed tensors on a CPU for the next step, instead of returning it to the system.

By default, glibc returns large blocks when they are freed. The system clears their pages when the next step allocates
them again, which takes 5 to 20 % of the time of a training step with large activations, and more or less of it from one
start of a program to the next. Memory that is kept is also available to the rest of the process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # M_TRIM_THRESHOLD and so on, of mallopt(3)
NEVER = -1
# What glibc itself sets in a program that has freed a block of 32 MiB, before it is configured; and its default.
USUAL = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20, MMAP_MAX: 65_536}
USERS_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Keep freed memory within this context."""
    keep_freed_memory(device)
    try:
        yield
    finally:
        return_freed_memory(device)


def keep_freed_memory(device: torch.device) -> None:
    """Let this process keep what it frees, if it computes on a CPU and the user has not configured glibc's malloc."""
    if libc := _glibc_for(device):
        libc.mallopt(TRIM_THRESHOLD, NEVER)
        libc.mallopt(MMAP_MAX, 0)


def return_freed_memory(device: torch.device) -> None:
    """Undo `keep_freed_memory`, and return what was kept."""
    if libc := _glibc_for(device):
        for setting, value in USUAL.items():
            libc.mallopt(setting, value)
        libc.malloc_trim(0)


def _glibc_for(device: torch.device) -> Any:
    """Return the C library; None if it is not to be tuned, or is not glibc."""
    if device.type != "cpu" or any(name in os.environ for name in USERS_SETTINGS):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
