"""What a collective is carried out with: the process set's data collectives, its control connection, its buffers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.engine.control import Control
from lockstep.hvd.engine.transfers import Transfers


class Exchange:
    """What the workers of a process set move tensors and numbers by.

    Args:
        control: The set's control connection, for what is small, and for the sizes that only all together know.
        ranks: The global ranks of the set.

    Attributes:
        transfers: The data collectives for the tensors of the requests that are being carried out.
    """

    transfers: Transfers

    def __init__(self, control: Control, ranks: Sequence[int]) -> None:
        self.control = control
        self.ranks = ranks
        self.rank = control.rank
        self.size = control.size
        self._buffers: dict[Any, torch.Tensor] = {}

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """Whole numbers of all workers, by rank."""
        messages = self.control.exchange_bytes(struct.pack(f"<{len(own)}q", *own))
        return [list(struct.unpack(f"<{len(message) // 8}q", message)) for message in messages]

    def buffer(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """A fusion buffer for the elements of all tensors; kept, since fresh memory costs more than the copy."""
        count = sum(tensor.numel() for tensor in tensors)
        key = dtype, tensors[0].device
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[key] = torch.empty(count, dtype=dtype, device=tensors[0].device)
        return buffer[:count]
