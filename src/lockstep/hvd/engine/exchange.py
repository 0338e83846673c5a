"""The resources for executing a collective: the process set's data collectives, control connection and buffers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from lockstep.hvd.engine.control import Control
from lockstep.hvd.engine.transfers import Transfers

BUFFER_BYTES = 32 << 20  # the largest fusion buffer that is kept between operations


class Exchange:
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
