"""The connections that carry a process set's data: Gloo's from the beginning, NCCL's from the first CUDA tensor on.

NCCL refuses two workers on one GPU unless NCCL_MULTI_RANK_GPU_ENABLE=1, which newer ones know. Such workers, and those
of a torch without NCCL, send CUDA tensors through the host's memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lockstep.hvd.groups import nccl_group
from lockstep.hvd.request import Request
from lockstep.hvd.transfers import GlooTransfers, NcclTransfers, StagedTransfers, Transfers

logger = logging.getLogger("lockstep.hvd")


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
        self._gloo_group = gloo
        self._gloo = GlooTransfers(gloo, rank, size) if size > 1 else Transfers()
        self._cuda: Transfers | None = None
        self._nccl_group: Any = None
        self._stream: Any = None

    def transfers(self, device: torch.device) -> Transfers:
        """The collectives for tensors on the CPU or on this worker's CUDA device; all workers ask at one point."""
        if device.type == "cpu":
            return self._gloo
        if self._cuda is None:
            self._stream = torch.cuda.Stream(device)
            self._cuda = self._connect(device) if self._size > 1 else Transfers()
        return self._cuda

    def _connect(self, device: torch.device) -> Transfers:
        # On a connection of its own, since another thread may wait on this one.
        store = self._store.clone()
        if why := without_nccl(store, self._rank, self._size, str(torch.cuda.get_device_properties(device).uuid)):
            logger.warning("CUDA tensors go through the host's memory and Gloo: %s", why)
            return StagedTransfers(self._gloo_group, self._rank, self._size)
        with torch.cuda.device(device):
            self._nccl_group = nccl_group(store, self._rank, self._size)
        return NcclTransfers(self._nccl_group, self._rank, self._size)

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
        self._cuda = self._nccl_group = self._gloo_group = None
        self._gloo = Transfers()
        if group is not None and lost_peer:
            group.abort()
        elif group is not None:
            stream.synchronize()


def without_nccl(store: dist.Store, rank: int, size: int, gpu: str) -> str | None:
    """Why these workers cannot use NCCL; None where they can. All of them call this, each with its GPU's UUID."""
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    store.set(f"gpu/{rank}", gpu if dist.is_nccl_available() else "")
    gpus = [store.get(f"gpu/{other}").decode() for other in range(size)]
    if "" in gpus:
        return f"the torch of rank {gpus.index('')} has no NCCL"
    twice = next((other for other in range(size) if gpus.index(gpus[other]) < other), None)
    if twice is None or shares:
        return None
    return (
        f"ranks {gpus.index(gpus[twice])} and {twice} share a GPU, which NCCL refuses; give each worker a GPU of its "
        "own, or set NCCL_MULTI_RANK_GPU_ENABLE=1 where NCCL knows it"
    )
