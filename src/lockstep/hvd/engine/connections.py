"""The connections that carry a process set's data: Gloo's from the beginning, the accelerator's from its first tensor.

NCCL refuses two workers on one GPU, unless newer ones are told not to. Such workers, and those of a torch without their
accelerator's library, send its tensors through the host's memory.
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


class Links:
    """The data collectives of a process set, by device.

    Args:
        gloo: The set's Gloo group; None where this worker is alone in it.
        store: Where the accelerator's group meets.
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
        """The collectives for tensors on the CPU or on this worker's accelerator; all workers ask at one point."""
        if device.type == "cpu":
            return self._gloo
        if self._own is None:
            if self._size > 1:
                accelerator.use(device)  # in the engine's thread, whose current device is the first one as yet
            self._device = device
            self._stream = accelerator.new_stream(device, urgent=True)
            self._own = self._connect(device) if self._size > 1 else Transfers()
        return self._own

    def _connect(self, device: torch.device) -> Transfers:
        # On a connection of its own, since another thread may wait on this one.
        store = self._store.clone()
        has_library = accelerator.has_collectives(device.type)
        own = f"{socket.gethostname()} {accelerator.identity(device)}" if has_library else ""
        if why := staging_reason(store, self._rank, self._size, own):
            if self._rank == 0:
                logger.warning("tensors on %s go through the host's memory and Gloo: %s", device.type, why)
            return StagedTransfers(self._gloo_group, self._rank, self._size)
        self._group = accelerator.group(store, self._rank, self._size, device, NO_TIMEOUT)
        return DeviceTransfers(self._group, self._rank, self._size)

    @contextmanager
    def on_stream(self, device: torch.device, batch: Sequence[Collective]) -> Iterator[Any]:
        """Work on the set's own stream, after the streams on which the tensors came about; None for the CPU."""
        if device.type == "cpu":
            yield None
            return
        for request in batch:
            if request.written is not None:
                self._stream.wait_event(request.written)
            if not request.in_place:  # else the request holds them until its stream comes after this one's work
                for tensor in request.tensors:
                    tensor.record_stream(self._stream)
        with accelerator.on(self._stream):
            yield self._stream

    def disconnect(self) -> None:
        """Let go of Gloo's connections, so that peers that wait for this worker notice."""
        self._own = self._gloo_group = None
        self._gloo = Transfers()

    def is_stuck(self, seconds: float) -> bool:
        """Whether the accelerator has not done the group's work after so long, as when it waits for a lost peer."""
        deadline = time.monotonic() + seconds
        try:
            while self._group is not None and not self._stream.query():
                if time.monotonic() > deadline:
                    return True
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # a device's error that an operation has left behind
            return True
        return False

    def close(self) -> None:
        """After a good end. The workers of a host wait for each other in it."""
        group, self._group = self._group, None
        if group is not None:
            self._stream.synchronize()
            group.shutdown()  # left out, torch aborts, which may cut off the last bytes to a peer, and warns

    def abort(self) -> None:
        """After a failure: what is under way ends at once, with what it has, before this returns."""
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
    """Why these workers cannot use their accelerators' library; None where they can. All of them call this.

    Args:
        device: What tells this worker's device from all others of all hosts; "" where its torch has no such library.
    """
    devices = exchange(store, rank, size, device)
    if "" in devices:
        return f"the torch of rank {devices.index('')} has no collectives for it"
    twice = next((other for other in range(size) if devices.index(devices[other]) < other), None)
    if twice is None or accelerator.may_be_shared():
        return None
    return (
        f"ranks {devices.index(devices[twice])} and {twice} share a GPU, which NCCL refuses; give each worker a GPU of "
        "its own, or set NCCL_MULTI_RANK_GPU_ENABLE=1 where NCCL knows it"
    )
