"""The data connections of a process set: Gloo from the start, the accelerator's library from the first GPU tensor.

NCCL does not support two workers on one GPU, except newer versions with NCCL_MULTI_RANK_GPU_ENABLE=1. In this case, and
if torch lacks the accelerator's library, tensors are staged in host memory and sent with Gloo.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lockstep.hvd.engine.request import Collective
from lockstep.hvd.engine.settings import NO_TIMEOUT
from lockstep.hvd.engine.transfers import DeviceTransfers, GlooTransfers, StagedTransfers, Transfers
from lockstep.world import accelerator
from lockstep.world.devices import exchange

ABORT_SECONDS = 5.0
POLL_SECONDS = 0.01

logger = logging.getLogger("lockstep.hvd")


class DataConnections:
    """The data collectives of a process set, by device.

    Args:
        gloo: The set's Gloo group; None if the set has one worker.
        store: The store for connecting the accelerator's group.
    """

    def __init__(self, gloo: Any, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._gloo_group = gloo
        self._gloo = GlooTransfers(gloo, rank, size) if size > 1 else Transfers()
        self._own: Transfers | None = None  # the accelerator's, and its device, group and stream
        self._device: Any = None
        self._group: Any = None
        self._stream: Any = None

    def transfers(self, device: torch.device) -> Transfers:
        """Return the collectives for tensors on `device`; the first call for an accelerator connects (collective)."""
        if device.type == "cpu":
            return self._gloo
        if self._own is None:
            if self._size > 1:
                accelerator.use(device)  # the engine's thread starts with device 0 as its current one
            self._device = device
            self._stream = accelerator.new_stream(device, urgent=True)
            self._own = self._connect(device) if self._size > 1 else Transfers()
        return self._own

    def _connect(self, device: torch.device) -> Transfers:
        # A separate connection, since another thread may be blocked on this one.
        store = self._store.clone()
        has_library = accelerator.has_collectives(device.type)
        own = f"{socket.gethostname()} {accelerator.card(device)}" if has_library else ""
        if why := staging_reason(store, self._rank, self._size, own):
            if self._rank == 0:
                logger.warning("sending %s tensors through host memory and Gloo: %s", device.type, why)
            return StagedTransfers(self._gloo_group, self._rank, self._size)
        self._group = accelerator.group(store, self._rank, self._size, device, NO_TIMEOUT)
        # All workers must call the same operation, also if their GPUs differ.
        averages = all(
            exchange(dist.PrefixStore("averages", store), self._rank, self._size, accelerator.averages(device))
        )
        return DeviceTransfers(self._group, self._rank, self._size, averages)

    @contextmanager
    def on_stream(self, device: torch.device, batch: Sequence[Collective]) -> Iterator[Any]:
        """Run on the set's stream, after the work that produced the tensors; yields the stream, None for the CPU."""
        if device.type == "cpu":
            yield None
            return
        for request in batch:
            if request.written is not None:
                self._stream.wait_event(request.written)
            if not request.in_place:  # an in-place request keeps its tensors alive itself
                for tensor in request.tensors:
                    tensor.record_stream(self._stream)
        with accelerator.on(self._stream):
            yield self._stream

    def disconnect(self) -> None:
        """Release Gloo's connections, so that peers waiting for this worker get an error."""
        self._own = self._gloo_group = None
        self._gloo = Transfers()

    def is_stuck(self, seconds: float) -> bool:
        """Return whether device work failed, or is unfinished after `seconds` because it may wait for a dead peer."""
        deadline = time.monotonic() + seconds
        try:
            while self._group is not None and not self._stream.query():
                if time.monotonic() > deadline:
                    return True
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # a device error from an earlier operation
            return True
        return False

    def close(self) -> None:
        """Close the group after a clean shutdown (collective among the workers of a host)."""
        group, self._group = self._group, None
        if group is not None:
            self._stream.synchronize()
            group.shutdown()  # otherwise torch warns and aborts, which can lose the last bytes sent to a peer

    def abort(self) -> None:
        """Cancel the work in progress after a failure. Wait up to ABORT_SECONDS for it to stop; results are partial."""
        group, self._group = self._group, None
        if group is None:
            return

        def work() -> None:
            accelerator.use(self._device)
            group.abort()
            self._stream.synchronize()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(ABORT_SECONDS)


def staging_reason(store: dist.Store, rank: int, size: int, device: str) -> str | None:
    """Return why the workers cannot use their accelerators' library; None if they can. Collective.

    Args:
        device: Identifies this worker's device among all hosts; "" if its torch lacks the library.
    """
    devices = exchange(store, rank, size, device)
    if "" in devices:
        return f"torch on rank {devices.index('')} was built without collectives for them"
    twice = next((other for other in range(size) if devices.index(devices[other]) < other), None)
    if twice is None or accelerator.may_be_shared():
        return None
    return (
        f"ranks {devices.index(devices[twice])} and {twice} share a GPU, or have MIG instances of one, which NCCL does "
        "not support; assign one GPU to each worker, or set NCCL_MULTI_RANK_GPU_ENABLE=1 if your NCCL supports it"
    )
