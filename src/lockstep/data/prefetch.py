"""Copying the next batch to the GPU while the current one is used."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lockstep.data.readers import Batch


def prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the same batches, each made one ahead on a stream of its own where `device` is a GPU.

    `batches` must make its tensors with non-blocking copies from pinned memory, on the current stream.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = torch.cuda.Stream(device)
    used_by = torch.cuda.current_stream(device)
    side.wait_stream(used_by)

    def make() -> Batch | None:
        with torch.cuda.stream(side):
            return next(batches, None)

    coming = make()
    while coming is not None:
        used_by.wait_stream(side)
        for tensor in coming:
            if tensor is not None:
                tensor.record_stream(used_by)  # the side stream must not reuse this memory too early
        ready, coming = coming, make()
        yield ready
