"""Keep the memory of freed tensors on a CPU for the next step, and copy tensors of accelerators to pinned memory.

By default, glibc returns large freed blocks to the system. The next step allocates them again, and the system must zero
their pages. This takes 5 to 20 % of the time of a training step with large activations.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.world import accelerator

if TYPE_CHECKING:
    import torch

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # M_TRIM_THRESHOLD and so on, of mallopt(3)
KEEP = {TRIM_THRESHOLD: -1, MMAP_MAX: 0}
# What glibc itself reaches after a program has freed a block of 32 MiB, and its default number of mapped blocks.
RETURN = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20, MMAP_MAX: 65_536}
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
PINNED = 0.25  # share of the free memory to pin at most; the system cannot swap it, and torch keeps it


def keep_freed_memory(device: torch.device, libc: Any = None) -> None:
    """Keep what this process frees, if it computes on a CPU and no variable configures glibc's malloc."""
    if device.type == "cpu":
        _configure(KEEP, libc)


def return_freed_memory() -> None:
    """Return freed memory to the system again, in a loader process, whose parent may keep it."""
    _configure(RETURN)


def _configure(settings: dict[int, int], libc: Any = None) -> None:
    libc = libc or ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name in os.environ for name in MALLOC_VARIABLES):
        for setting, value in settings.items():
            libc.mallopt(setting, value)


class PinnedCopies:
    """Copies tensors to the host; from devices with streams, asynchronously into pinned memory.

    Asynchronous copies run on a separate stream, so call `protect` before changing the copied tensors. If a state is so
    large that pinning it could use up the host's memory, the host waits for the rest of its copies.

    Args:
        workers: The number of workers on this host, which share its memory.
    """

    def __init__(self, device: torch.device, workers: int = 1):
        self._device = device
        self._workers = workers
        self._pinned = self._most_pinned = 0  # bytes: of this state, and of the largest so far
        self._limit = 0
        self._side = accelerator.new_stream(device) if accelerator.overlaps(device) else None
        self._held: list[torch.Tensor] = []
        self._copied: torch.Event | None = None

    def steady(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors, or clones on the device if copying is asynchronous; the clones need no `protect`."""
        return {name: tensor.clone() for name, tensor in tensors.items()} if self._side else tensors

    @contextmanager
    def making(self) -> Iterator[Callable[[], None]]:
        """Surround `copy_tensor`. Yield a function that waits for the copies, on any thread, after the block."""
        if self._side is None:
            yield lambda: None
            return
        import psutil
        import torch

        copied = torch.Event(self._device)
        self._most_pinned = max(self._pinned, self._most_pinned)
        free = int(PINNED * psutil.virtual_memory().available / self._workers)
        self._pinned, self._limit = 0, max(free, self._most_pinned)  # torch has kept what was pinned before

        def wait() -> None:
            accelerator.use(self._device)
            copied.synchronize()

        self._side.wait_stream(accelerator.current_stream(self._device))
        with accelerator.on(self._side):
            yield wait
        self._side.record_event(copied)
        self._copied = copied

    def copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor, within `making`."""
        pinned = self._pinned + (1 << max(0, tensor.nbytes - 1).bit_length())  # torch pins powers of two
        import torch

        if self._side is None or tensor.device.type != self._device.type or pinned > self._limit:
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._pinned = pinned
        self._held.append(tensor)  # keeps its memory from being reused before it is copied
        return accelerator.pinned_like(tensor).copy_(tensor, non_blocking=True)

    def protect(self) -> None:
        """Make the device finish the copies before later work; the host does not wait."""
        if self._copied is not None:
            accelerator.current_stream(self._device).wait_event(self._copied)
            self._copied = None
            self._held.clear()
