"""Gradient compression for DistributedDataParallel, by torch's own communication hooks. The base compresses nothing."""

# No "from __future__ import annotations": torch looks at a hook's annotations, and wants the types themselves.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep.train.strategies.base import Tensors, Traffic

Future = torch.futures.Future[torch.Tensor]
HALF_BYTES = 2
HALF_HOOKS: dict[str, Callable[[Any, dist.GradBucket], Future]] = {
    "fp16": fp16_compress_hook,
    "bf16": bf16_compress_hook,
}


class GradientCompression:
    """What the strategy asks of a compression, done without one: gradients travel as they are."""

    remembers_gradients = False
    """Whether what is left out of a step's gradients is added to the next one's."""
    gathers_state = False
    """Whether `gather_state` is needed before the state is whole on rank 0."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Have a model's gradients travel in this way."""

    def forget(self) -> None:
        """Drop what is kept of earlier gradients."""

    def rescale(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on."""

    def gather_state(self) -> None:
        """Bring to rank 0 what the other workers alone have."""

    def state_dict(self) -> Tensors:
        """On rank 0, after `gather_state`: the state of all workers."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Go on from a state of any number of workers."""


class HalfCompression(GradientCompression):
    """Gradients are summed in float16 or bfloat16: half the bytes of float32."""

    def __init__(self, kind: str):
        super().__init__()
        self._hook = HALF_HOOKS[kind]

    def attach(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(None, self._reduce)

    def _reduce(self, state: object, bucket: dist.GradBucket) -> Future:
        self.traffic.plain_bytes += bucket.buffer().nbytes
        self.traffic.sent_bytes += bucket.buffer().numel() * HALF_BYTES
        return self._hook(None, bucket)
