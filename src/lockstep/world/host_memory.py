"""Keep the memory of freed tensors on a CPU for the next step, instead of returning it to the system.

By default, glibc returns large freed blocks to the system. The next step allocates them again, and the system must zero
their pages. This takes 5 to 20 % of the time of a training step with large activations, and the share varies between
starts of a program. Memory that is kept is also available to the rest of the process.
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
# What glibc itself reaches after a program has freed a block of 32 MiB, and its default. The state before, in which it
# adapts the first two, can neither be read nor restored.
USUAL = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20, MMAP_MAX: 65_536}
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

_depth = 0  # of contexts, which a job within a callback of another one nests


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Keep what this process frees, if it computes on a CPU and no variable configures glibc's malloc.

    Afterwards, what was kept is returned, and malloc has the settings of `USUAL`.
    """
    global _depth
    libc = _glibc() if device.type == "cpu" else None
    if libc is None:
        yield
        return
    _depth += 1
    libc.mallopt(TRIM_THRESHOLD, NEVER)
    libc.mallopt(MMAP_MAX, 0)
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _return_freed_memory(libc)


def return_in_child() -> None:
    """Return freed memory in a forked process, such as a loader, whose parent keeps it."""
    global _depth
    libc = _glibc()
    if _depth and libc is not None:
        _depth = 0
        _return_freed_memory(libc)


def _return_freed_memory(libc: Any) -> None:
    for setting, value in USUAL.items():
        libc.mallopt(setting, value)
    libc.malloc_trim(0)


def _glibc() -> Any:
    """Return the C library, unless the user has configured its malloc or it is not glibc."""
    if any(name in os.environ for name in MALLOC_VARIABLES):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
