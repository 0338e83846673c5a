"""The data collectives of a process set: four operations, with Gloo or the accelerator's library.

Gloo is connected from the start, the accelerator's library with the first GPU tensor. NCCL does not support two workers
on one GPU, except newer versions with NCCL_MULTI_RANK_GPU_ENABLE=1. In this case, and if torch lacks the accelerator's
library, tensors are staged in host memory and sent with Gloo.

All tensors are contiguous. Every worker calls the same operations in the same order. Operations return when the result
is ready (Gloo) or ordered on the current stream (an accelerator's library).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp

from lockstep.errors import WorldError, first_line
from lockstep.hvd.engine.settings import NO_TIMEOUT
from lockstep.world import accelerator
from lockstep.world.devices import exchange
from lockstep.world.interfaces import own_address

ABORT_SECONDS = 5.0
POLL_SECONDS = 0.01
DATA_TAG = 2

logger = logging.getLogger("lockstep.hvd")


def gloo_group(store: dist.Store, rank: int, size: int, timeout_seconds: float, one_host: bool) -> Any:
    """Connect `size` workers (collective).

    Args:
        store: The same on all workers.
        one_host: Whether all workers of the job are on this host; then only loopback is used.

    Raises:
        WorldError: A peer cannot be reached within the timeout.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_seconds)
    try:
        options._devices = [_gloo_device(own_address(one_host))]
        group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        # To a worker, it is connected once its peer's system has accepted; the peer itself may see that only later, and
        # would fail if this worker disconnected at once.
        group.barrier().wait()
        return group
    except (RuntimeError, OSError) as error:
        raise WorldError(
            f"worker {rank} on {socket.gethostname()} cannot connect to its peers: {first_line(error)}; "
            f"to choose the network interface, set GLOO_SOCKET_IFNAME"
        ) from error


@cache  # each device starts a thread
def _gloo_device(address: str) -> Any:
    return dist.ProcessGroupGloo.create_device(hostname=address)


class Transfers:
    """The operations of a single worker: nothing is sent."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensors: Sequence[torch.Tensor], operation: ReduceOp.RedOpType) -> None:
        """Reduce each tensor over the workers, in place."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite a tensor with that of rank `root` of this group."""

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Concatenate the workers' tensors, of one shape [rows, ...], along the first dimension: [size * rows, ...]."""
        self.all_to_all(output.split(len(tensor)) if len(tensor) else [output] * self.size, [tensor] * self.size)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Send `inputs[i]` to worker i, and receive `outputs[i]` from it. Sizes may differ, and may be 0."""
        outputs[self.rank].copy_(inputs[self.rank])


class GroupTransfers(Transfers):
    """Collectives over a process group of torch. Broadcasts send bytes, since Gloo does not support all dtypes."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group = group

    def all_reduce(self, tensors: Sequence[torch.Tensor], operation: ReduceOp.RedOpType) -> None:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(operation)
        options.timeout = NO_TIMEOUT
        works = [self._group.allreduce([tensor], options) for tensor in tensors if tensor.numel()]
        for work in works:
            work.wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if tensor.numel():
            options = BroadcastOptions()
            options.rootRank = root
            options.timeout = NO_TIMEOUT
            self._group.broadcast([as_bytes(tensor)], options).wait()


class GlooTransfers(GroupTransfers):
    """Collectives over a Gloo group. All-to-all sends bytes, too."""

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        # Point to point: each byte is sent once, even if sizes differ, which Gloo's all-gather does not support. Every
        # worker starts with a different peer, so that they do not all send to the same one.
        works = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            if inputs[to].numel():
                works.append(self._group.send([as_bytes(inputs[to])], to, DATA_TAG))
            if outputs[source].numel():
                works.append(self._group.recv([as_bytes(outputs[source])], source, DATA_TAG))
        super().all_to_all(outputs, inputs)
        for work in works:
            work.wait(NO_TIMEOUT)


class StagedTransfers(GlooTransfers):
    """Collectives over a Gloo group for an accelerator's tensors, which are copied to the host and back.

    The host waits for the device.
    """

    def all_reduce(self, tensors: Sequence[torch.Tensor], operation: ReduceOp.RedOpType) -> None:
        staged = [_on_host(tensor) for tensor in tensors]
        super().all_reduce(staged, operation)
        for tensor, result in zip(tensors, staged, strict=True):
            tensor.copy_(result)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        staged = _on_host(tensor)
        super().broadcast(staged, root)
        if self.rank != root:
            tensor.copy_(staged)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        received = [torch.empty(output.shape, dtype=output.dtype, device="cpu") for output in outputs]
        super().all_to_all(received, [_on_host(tensor) for tensor in inputs])
        for output, part in zip(outputs, received, strict=True):
            output.copy_(part)


class DeviceTransfers(GroupTransfers):
    """Collectives with the accelerator's library, on the current stream; the host does not wait."""

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        # The library's ring sends less than all-to-all, which would send a copy to each worker of another host.
        if tensor.numel():
            self._group._allgather_base(as_bytes(output), as_bytes(tensor)).wait()

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._group.alltoall([as_bytes(tensor) for tensor in outputs], [as_bytes(tensor) for tensor in inputs]).wait()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory; blocks until it is complete."""
    return tensor.to("cpu", copy=True)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8 [bytes]."""
    # Not reshape(-1): a tensor with a single element is contiguous with any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


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
        return DeviceTransfers(self._group, self._rank, self._size)

    @contextmanager
    def on_stream(self, device: torch.device) -> Iterator[Any]:
        """Run on the set's stream, which it yields; None for the CPU."""
        if device.type == "cpu":
            yield None
            return
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
