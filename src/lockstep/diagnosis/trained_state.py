"""What a worker publishes now and then of what it trains, so that the launcher can compare the workers."""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass

MAX_LINE = 120  # bytes of the script's line; of a longer path, the end is kept
UNKNOWN = -1  # exchanges
STATE_LAYOUT = struct.Struct(f"=q7qqq???d{MAX_LINE}s")


@dataclass(frozen=True)
class TrainedState:
    """Fingerprints of a worker's weights and of what has changed them, after a step. 0: none, or unknown.

    Args:
        step: The number of steps, from 1; 0: nothing was compared yet.
        began: Of the weights before the first step. Weights of which each worker has a part are left out.
        weights: Of the weights after the step. If DistributedDataParallel averages gradients, only its weights.
        gradients: Of their gradients.
        samples: Of the loaders' batches in the step.
        loss: Of the loss.
        settings: Of the optimizers' settings.
        processor: Of the device's name; other processors may round differently.
        exchanges: The number of collectives since the first step; `UNKNOWN` if some may be missed.
        epochs: The number of passes over the data that have ended.
        is_wrapped: Whether DistributedDataParallel has averaged the gradients of these weights over all workers.
        is_joined: Whether the worker has a process group with others.
        repeats_order: Whether a DistributedSampler that shuffles has had the same epoch in several passes.
        rate: The learning rate of the first group of parameters.
        line: "file:line" of the script, where the step was taken.
    """

    step: int = 0
    began: int = 0
    weights: int = 0
    gradients: int = 0
    samples: int = 0
    loss: int = 0
    settings: int = 0
    processor: int = 0
    exchanges: int = UNKNOWN
    epochs: int = 0
    is_wrapped: bool = False
    is_joined: bool = False
    repeats_order: bool = False
    rate: float = 0.0
    line: str = ""

    def pack(self) -> bytes:
        """Return it as `STATE_LAYOUT.size` bytes."""
        *numbers, line = astuple(self)
        return STATE_LAYOUT.pack(*numbers, line.encode()[-MAX_LINE:])

    @classmethod
    def unpack(cls, data: bytes) -> TrainedState:
        """Return what `pack` has packed."""
        *numbers, line = STATE_LAYOUT.unpack(data)
        return cls(*(*numbers, line.rstrip(b"\0").decode(errors="replace")))
