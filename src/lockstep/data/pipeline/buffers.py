"""Reused memory for batches: page faults cost more than writing the data.

On Linux a page fault zeroes 4 KiB and takes 0.1 to 0.3 µs, so allocating a batch of 224 x 224 images takes as long as
normalizing it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from lockstep.errors import DataError, first_line

# Two batches prefetched by a loader process (DataLoader's prefetch_factor), and one in use by the parent.
BATCHES_UNDER_WAY = 3


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor of a loader process to shared memory, for passing it to the parent.

    If the multiprocessing queue did this, an error would occur in its thread, and the parent would wait forever.

    Raises:
        DataError: Shared memory is full.
    """
    if get_worker_info() is None:
        return tensor
    try:
        tensor.share_memory_()
    except RuntimeError as error:
        raise DataError(
            f"shared memory is full: a loader process needs {tensor.nbytes / 2**20:,.0f} MiB per batch and keeps "
            f"{BATCHES_UNDER_WAY} batches ({first_line(error)}); enlarge /dev/shm (docker run --shm-size), or lower "
            f"--workers or --batch-size"
        ) from None
    return tensor


class BufferPool:
    """Allocates CPU tensors from memory that no earlier tensor, view or autograd graph references any longer."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            block = next((block for block in self._blocks if block.is_free() and block.memory.nbytes >= size), None)
            if block is None:
                self._blocks = [block for block in self._blocks if not block.is_free()]  # too small
                block = _Block(size)
                self._blocks.append(block)
            array = block.lend()
        return torch.from_numpy(array)[:size].view(dtype).view(*shape)


class _Block:
    """A block of memory, in use as long as the array from `lend` is alive; a tensor's storage keeps it alive."""

    def __init__(self, size: int):
        self.memory = np.empty(max(1, size), np.uint8)
        self._lent: Callable[[], npt.NDArray[np.uint8] | None] = lambda: None

    def lend(self) -> npt.NDArray[np.uint8]:
        array = self.memory[:]
        self._lent = weakref.ref(array)
        return array

    def is_free(self) -> bool:
        return self._lent() is None


class SharedRing:
    """A ring of shared-memory buffers, in which a loader process passes batches to the parent without a copy.

    The parent must finish with a batch before it requests the next one.
    """

    def __init__(self) -> None:
        self._own = BufferPool()
        self._buffers: list[torch.Tensor] = []
        self._turn = cycle(range(BATCHES_UNDER_WAY))

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """Return an uninitialized uint8 tensor; outside a loader process, in private memory.

        Raises:
            DataError: Shared memory is full.
        """
        if get_worker_info() is None:
            return self._own.take(shape, torch.uint8)
        size = math.prod(shape)
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = [
                share(torch.empty(size, dtype=torch.uint8, device="cpu")) for _ in range(BATCHES_UNDER_WAY)
            ]
        return self._buffers[next(self._turn)][:size].view(*shape)
