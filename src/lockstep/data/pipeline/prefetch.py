"""Prepare the next batch while the current one is used: on a side stream of the GPU, or in a CPU thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt
import torch

from lockstep.data.sets import Batch
from lockstep.world import accelerator


def send(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device; to a GPU, asynchronously from pinned memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if accelerator.overlaps(device) else tensor.to(device)


def prefetch(batches: Iterator[Batch], device: torch.device, in_thread: bool = False) -> Iterator[Batch]:
    """Yield batches, preparing the next one while the current one is in use.

    Args:
        batches: For a GPU, must create its tensors by non-blocking copies from pinned memory, on the current stream.
        in_thread: Whether batches may be made in a thread, on a CPU, because they use no global state, such as torch's
            generator. If torch uses several threads, batches are made on demand instead: torch's threads synchronize
            after each operation, and an extra thread on the same cores makes a step 1.5 times as slow.
    """
    if accelerator.overlaps(device):
        return _by_stream(batches, device)
    return _by_thread(batches) if in_thread and torch.get_num_threads() == 1 else batches


def _by_thread(batches: Iterator[Batch]) -> Iterator[Batch]:
    with ThreadPoolExecutor(1, "lockstep-prefetch") as thread:
        coming = thread.submit(next, batches, None)
        while (ready := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield ready


def _by_stream(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    side = accelerator.new_stream(device)
    used_by = accelerator.current_stream(device)
    side.wait_stream(used_by)

    def make() -> Batch | None:
        with accelerator.on(side):
            return next(batches, None)

    coming = make()
    while coming is not None:
        used_by.wait_stream(side)
        for tensor in coming:
            if tensor is not None:
                tensor.record_stream(used_by)  # the side stream must not reuse this memory too early
        ready, coming = coming, make()
        yield ready
