"""The resources for executing a collective: the process set's control connection, data collectives and buffers.

The control connection gathers small messages. Gloo's all-gather of a few bytes takes four to six times as long as a
send and a receive (500 us against 100 us, two workers on loopback, torch 2.15), because it uses a queue and another
thread. This is Bruck's all-gather over plain sends and receives instead: ceil(log2(size)) steps for any number of
workers (J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
1997).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.engine.settings import NO_TIMEOUT
from lockstep.hvd.engine.transfers import Transfers

CAPACITY_BYTES = 2048  # the largest message that fits one exchange
LENGTH_BYTES = 8
CONTROL_TAG = 1


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


BUFFER_BYTES = 32 << 20  # the largest fusion buffer that is kept between operations


class CollectiveContext:
    """Moves tensors and numbers among the workers of a process set.

    Args:
        control: The set's control connection, for small payloads and sizes.
        ranks: The global ranks of the set.

    Attributes:
        transfers: The data collectives for the device of the current requests.
    """

    transfers: Transfers

    def __init__(self, control: Control, ranks: Sequence[int]) -> None:
        self.control = control
        self.ranks = ranks
        self.rank = control.rank
        self.size = control.size
        self._buffers: dict[torch.device, torch.Tensor] = {}  # uint8 [bytes]

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
