"""The resources for executing a collective: the process set's data collectives, control connection and buffers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.engine.control import Control
from lockstep.hvd.engine.transfers import Transfers


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
        self._buffers: dict[Any, torch.Tensor] = {}

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """Return all workers' integers, by rank."""
        messages = self.control.exchange_bytes(struct.pack(f"<{len(own)}q", *own))
        return [list(struct.unpack(f"<{len(message) // 8}q", message)) for message in messages]

    def buffer(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return a fusion buffer for the elements of all tensors; reused, since allocation costs more than the copy."""
        count = sum(tensor.numel() for tensor in tensors)
        key = dtype, tensors[0].device
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[key] = torch.empty(count, dtype=dtype, device=tensors[0].device)
        return buffer[:count]
