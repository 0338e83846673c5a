"""The control connection of a process set: every worker's message, on every worker.

Gloo's own all-gather of a few bytes takes four to six times as long as sending to a peer and receiving from it (500 us
against 100 us, two workers on loopback, torch 2.15), because it passes through a queue and another thread. So messages
travel by Bruck's all-gather over plain sends and receives: ceil(log2(size)) steps for any number of workers (J. Bruck
et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997).

What each receives grows with the number of workers. Among many, they first find out whether all say the same, which
takes as many steps, of some bytes each; in the usual case that is all. The steps are those of the dissemination barrier
(D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier synchronization", 1988).
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any

import torch

from lockstep.hvd.engine.settings import NO_TIMEOUT

CAPACITY_BYTES = 2048  # of a message that takes one exchange
CONTROL_TAG = 1
# Up to so many, 2 KiB of each take less time than the further steps that a message with tensors needs otherwise.
GATHERED_WORKERS = 256
SURVEY = struct.Struct("<QQQ")  # the lowest and the highest digest, and bytes of the longest message


class Control:
    """Exchanges messages among the `size` workers of a Gloo group, this one being `rank`."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size
        # Not zeros: among many workers most of it is never touched, and so takes no memory.
        self._memory = torch.empty(size * CAPACITY_BYTES, dtype=torch.uint8, device="cpu")
        self._blocks = self._memory.view(size, CAPACITY_BYTES)
        self._bytes = memoryview(self._memory.numpy()).cast("B")  # type: ignore[arg-type]
        self.outgoing = self._bytes[:CAPACITY_BYTES]
        self.outgoing_tensor = self._memory[:CAPACITY_BYTES].zero_()
        self.surveys = size > GATHERED_WORKERS  # whether `survey` comes before `exchange`
        self._said = torch.zeros(2, SURVEY.size, dtype=torch.uint8, device="cpu")
        self._said_bytes = memoryview(self._said.numpy()).cast("B")  # type: ignore[arg-type]

    def exchange(self, size_bytes: int = CAPACITY_BYTES) -> list[memoryview]:
        """Send what `outgoing` begins with, and return all workers' messages by rank, valid until the next exchange.

        Args:
            size_bytes: Of a message, up to CAPACITY_BYTES; the same on all workers.
        """
        if size_bytes != self._blocks.shape[1]:
            self._blocks = self._memory[: self.size * size_bytes].view(self.size, size_bytes)
        self._gather(self._blocks)
        memory = self._bytes
        blocks = [memory[at : at + size_bytes] for at in range(0, self.size * size_bytes, size_bytes)]
        return blocks[-self.rank :] + blocks[: -self.rank] if self.rank else blocks

    def rows(self) -> torch.Tensor:
        """The last messages by rank, uint8 [size, size_bytes]."""
        return self._blocks.roll(self.rank, 0) if self.rank else self._blocks

    def survey(self, message: bytes) -> tuple[bool, int]:
        """Whether all workers give the same message, as its digest of 8 bytes tells, and how long the longest is."""
        lowest = highest = int.from_bytes(blake2b(message, digest_size=8).digest(), "little")
        longest, distance = len(message), 1
        while distance < self.size:
            SURVEY.pack_into(self._said_bytes, 0, lowest, highest, longest)
            sending = self._group.send([self._said[0]], (self.rank + distance) % self.size, CONTROL_TAG)
            receiving = self._group.recv([self._said[1]], (self.rank - distance) % self.size, CONTROL_TAG)
            receiving.wait(NO_TIMEOUT)
            sending.wait(NO_TIMEOUT)
            low, high, length = SURVEY.unpack_from(self._said_bytes, SURVEY.size)
            lowest, highest, longest = min(lowest, low), max(highest, high), max(longest, length)
            distance *= 2
        return lowest == highest, longest

    def exchange_bytes(self, message: bytes) -> list[bytes]:
        """All workers' messages of any length, by rank. Takes two exchanges."""
        self.outgoing[:8] = len(message).to_bytes(8, "little")
        lengths = [int.from_bytes(block, "little") for block in self.exchange(8)]
        blocks = torch.zeros(self.size, max(1, max(lengths)), dtype=torch.uint8, device="cpu")
        if message:
            blocks[0, : len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._gather(blocks)
        by_rank = blocks.roll(self.rank, 0)
        return [by_rank[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def _gather(self, blocks: torch.Tensor) -> None:
        """Fill row j with the message of rank + j; row 0 holds this worker's own."""
        have = 1
        while have < self.size:
            count = min(have, self.size - have)
            sending = self._group.send([blocks[:count]], (self.rank - have) % self.size, CONTROL_TAG)
            receiving = self._group.recv([blocks[have : have + count]], (self.rank + have) % self.size, CONTROL_TAG)
            receiving.wait(NO_TIMEOUT)
            sending.wait(NO_TIMEOUT)
            have += count
