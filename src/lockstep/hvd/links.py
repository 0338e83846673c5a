"""The connections that carry a process set's data: Gloo's from the beginning, NCCL's from the first CUDA tensor on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lockstep.hvd.groups import nccl_group
from lockstep.hvd.request import Request
from lockstep.hvd.transfers import GlooTransfers, NcclTransfers, Transfers


class Links:
    """The data collectives of a process set, by device.

    Args:
        gloo: The set's Gloo group; None where this worker is alone in it.
        store: Where NCCL's group meets.
    """

    def __init__(self, gloo: Any, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._gloo = GlooTransfers(gloo, rank, size) if size > 1 else Transfers()
        self._nccl: Transfers | None = None
        self._nccl_group: Any = None
        self._stream: Any = None

    def transfers(self, device: torch.device) -> Transfers:
        """The collectives for tensors on the CPU or on this worker's CUDA device; all workers ask at one point."""
        if device.type == "cpu":
            return self._gloo
        if self._nccl is None:
            self._stream = torch.cuda.Stream(device)
            if self._size > 1:
                with torch.cuda.device(device):
                    # On a connection of its own, since another thread may wait on this one.
                    self._nccl_group = nccl_group(self._store.clone(), self._rank, self._size)
                self._nccl = NcclTransfers(self._nccl_group, self._rank, self._size)
            else:
                self._nccl = Transfers()
        return self._nccl

    @contextmanager
    def on_stream(self, device: torch.device, batch: Sequence[Request]) -> Iterator[Any]:
        """Work on the set's own CUDA stream, after the streams on which the tensors came about; None for the CPU."""
        if device.type != "cuda":
            yield None
            return
        for request in batch:
            if request.written is not None:
                self._stream.wait_event(request.written)
            for tensor in request.tensors:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield self._stream

    def close(self, lost_peer: bool) -> None:
        """Let go of the connections; NCCL's kernels are waited for or, where a peer is gone, ended."""
        group, stream = self._nccl_group, self._stream
        self._nccl = self._nccl_group = None
        self._gloo = Transfers()
        if group is not None and lost_peer:
            group.abort()
        elif group is not None:
            stream.synchronize()
