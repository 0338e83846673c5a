"""The connections of a process set: a control connection for small messages, and the data collectives.

The data collectives are four operations, with Gloo or the accelerator's library. Gloo is connected from the start, the
accelerator's library with the first GPU tensor. NCCL does not support two workers on one GPU, except newer versions
with NCCL_MULTI_RANK_GPU_ENABLE=1. In this case, and if torch lacks the accelerator's library, tensors are staged in
host memory and sent with Gloo.

All tensors are contiguous. Every worker calls the same operations in the same order. Operations return when the result
is ready (Gloo) or ordered on the current stream (an accelerator's library).

The control connection gathers small messages. Gloo's all-gather of a few bytes takes four to six times as long as a
send and a receive (500 us against 100 us, two workers on loopback, torch 2.15), because it uses a queue and another
thread. This is Bruck's all-gather over plain sends and receives instead: ceil(log2(size)) steps for any number of
workers (J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
1997).
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp

from lockstep.errors import WorldError, first_line
from lockstep.hvd.engine.settings import NO_TIMEOUT
from lockstep.world import accelerator
from lockstep.world.interfaces import own_address
from lockstep.world.rendezvous import exchange

CAPACITY_BYTES = 2048  # the largest message that fits one exchange
BUFFER_BYTES = 32 << 20  # the largest fusion buffer that is kept between operations
ABORT_SECONDS = 5.0
POLL_SECONDS = 0.01
LENGTH_BYTES = 8
CONTROL_TAG, DATA_TAG = 1, 2

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


class Control:
    """Exchanges messages among the workers of a Gloo group."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size
        self._memory = torch.empty(size * CAPACITY_BYTES, dtype=torch.uint8, device="cpu")
        self._blocks = self._memory.view(size, CAPACITY_BYTES)
        self._bytes = memoryview(self._memory.numpy()).cast("B")  # type: ignore[arg-type]
        self.outgoing = self._bytes[:CAPACITY_BYTES]
        self.outgoing_tensor = self._memory[:CAPACITY_BYTES].zero_()

    def exchange(self, size_bytes: int = CAPACITY_BYTES) -> list[memoryview]:
        """Send the first bytes of `outgoing`; return all workers' messages by rank, valid until the next exchange.

        Args:
            size_bytes: The message size, up to CAPACITY_BYTES; the same on all workers.
        """
        if size_bytes != self._blocks.shape[1]:
            self._blocks = self._memory[: self.size * size_bytes].view(self.size, size_bytes)
        self._gather(self._blocks)
        memory = self._bytes
        blocks = [memory[at : at + size_bytes] for at in range(0, self.size * size_bytes, size_bytes)]
        return blocks[-self.rank :] + blocks[: -self.rank] if self.rank else blocks

    def rows(self) -> torch.Tensor:
        """Return the last messages by rank, uint8 [size, size_bytes]."""
        return self._blocks.roll(self.rank, 0) if self.rank else self._blocks

    def exchange_bytes(self, message: bytes) -> list[bytes]:
        """Return all workers' messages by rank, of any lengths. Takes a second exchange if one of them is long."""
        head = message[: CAPACITY_BYTES - LENGTH_BYTES]
        self.outgoing[:LENGTH_BYTES] = len(message).to_bytes(LENGTH_BYTES, "little")
        self.outgoing[LENGTH_BYTES : LENGTH_BYTES + len(head)] = head
        heads = self.exchange()
        lengths = [int.from_bytes(each[:LENGTH_BYTES], "little") for each in heads]
        if max(lengths) <= CAPACITY_BYTES - LENGTH_BYTES:
            pairs = zip(heads, lengths, strict=True)
            return [bytes(each[LENGTH_BYTES : LENGTH_BYTES + length]) for each, length in pairs]
        blocks = torch.zeros(self.size, max(lengths), dtype=torch.uint8, device="cpu")
        if message:
            blocks[0, : len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._gather(blocks)
        by_rank = blocks.roll(self.rank, 0)
        return [by_rank[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def _gather(self, blocks: torch.Tensor) -> None:
        """Fill row j with the message of worker rank + j; row 0 already holds this worker's message."""
        have = 1
        while have < self.size:
            count = min(have, self.size - have)
            sending = self._group.send([blocks[:count]], (self.rank - have) % self.size, CONTROL_TAG)
            receiving = self._group.recv([blocks[have : have + count]], (self.rank + have) % self.size, CONTROL_TAG)
            receiving.wait(NO_TIMEOUT)
            sending.wait(NO_TIMEOUT)
            have += count


class SetConnections:
    """The connections and the fusion buffers of a process set.

    Args:
        group: The set's Gloo group; None if the set has one worker.
        store: The store for connecting the accelerator's group.
        ranks: The global ranks of the set, sorted.
        rank: This worker's index in them.

    Attributes:
        control: The control connection, for small payloads and sizes.
        transfers: The data collectives for the device of the current requests.
    """

    def __init__(self, group: Any, store: dist.Store, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(ranks)
        self.control = Control(group, rank, self.size)
        self._store = store
        self._gloo_group = group
        self._gloo = GlooTransfers(group, rank, self.size) if self.size > 1 else Transfers()
        self.transfers: Transfers = self._gloo
        self._buffers: dict[torch.device, torch.Tensor] = {}  # uint8 [bytes]
        self._own: Transfers | None = None  # the accelerator's, and its device, group and stream
        self._device: Any = None
        self._group: Any = None
        self._stream: Any = None

    @contextmanager
    def on(self, device: torch.device) -> Iterator[Any]:
        """Set `transfers`, and run on the set's stream, which it yields; None for the CPU.

        The first call for an accelerator connects (collective).
        """
        if device.type == "cpu":
            self.transfers = self._gloo
            yield None
            return
        if self._own is None:
            if self.size > 1:
                accelerator.use(device)  # the engine's thread starts with device 0 as its current one
            self._device = device
            self._stream = accelerator.new_stream(device, urgent=True)
            self._own = self._connect(device) if self.size > 1 else Transfers()
        self.transfers = self._own
        with accelerator.on(self._stream):
            yield self._stream

    def _connect(self, device: torch.device) -> Transfers:
        # A separate connection, since another thread may be blocked on this one.
        store = self._store.clone()
        has_library = accelerator.has_collectives(device.type)
        own = f"{socket.gethostname()} {accelerator.card(device)}" if has_library else ""
        if why := staging_reason(store, self.rank, self.size, own):
            if self.rank == 0:
                logger.warning("sending %s tensors through host memory and Gloo: %s", device.type, why)
            return StagedTransfers(self._gloo_group, self.rank, self.size)
        self._group = accelerator.group(store, self.rank, self.size, device, NO_TIMEOUT)
        return DeviceTransfers(self._group, self.rank, self.size)

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """Return all workers' integers, by rank."""
        messages = self.control.exchange_bytes(struct.pack(f"<{len(own)}q", *own))
        return [list(struct.unpack(f"<{len(message) // 8}q", message)) for message in messages]

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a fusion buffer [count], valid until the next call; its memory is reused up to BUFFER_BYTES.

        Allocation costs more than the copy on a CPU, and would fragment an accelerator's memory.
        """
        # On an accelerator, the set's stream allocates the buffer and orders all its uses: the copies run on it, and it
        # waits for the library's stream after each collective. So neither reuse nor the release of a smaller buffer has
        # to wait or needs `record_stream`: the allocator gives the memory only to later work of the set's stream.
        size_bytes = count * dtype.itemsize
        if size_bytes > BUFFER_BYTES:
            return torch.empty(count, dtype=dtype, device=device)
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < size_bytes:
            buffer = self._buffers[device] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return buffer[:size_bytes].view(dtype)

    def disconnect(self) -> None:
        """Release Gloo's connections, so that peers waiting for this worker get an error."""
        del self.control
        self._own = self._gloo_group = None
        self._gloo = self.transfers = Transfers()
        self._buffers.clear()

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

    def abort(self, seconds: float = ABORT_SECONDS) -> None:
        """Cancel the work in progress after a failure. Wait up to `seconds` for it to stop; results are partial."""
        group, self._group = self._group, None
        if group is None:
            return

        def work() -> None:
            accelerator.use(self._device)
            group.abort()
            with suppress(RuntimeError):  # of the device, which the abort may leave unusable
                self._stream.synchronize()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)


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
