"""Gradient compression for DistributedDataParallel, with torch's communication hooks."""

# No "from __future__ import annotations": torch checks that the annotations of a hook are types.

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
    """The interface between the strategy and a compression; this one does not compress."""

    remembers_gradients = False
    """Whether the compression error of a step is added to the next step's gradients."""
    gathers_state = False
    """Whether rank 0 has the complete state only after `gather_state`."""
    waits_in_backward = False
    """Whether a backward pass waits for other workers between its gradients."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Compress the gradients of a model."""

    def forget(self) -> None:
        """Drop state derived from earlier gradients."""

    def rescale(self, factor: float) -> None:
        """Scale state derived from gradients by `factor`."""

    def gather_state(self) -> None:
        """Send the state of other workers to rank 0. Collective."""

    def state_dict(self) -> Tensors:
        """Return the state of all workers, on rank 0 after `gather_state`."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a state of any number of workers."""


class HalfCompression(GradientCompression):
    """Sums gradients in float16 or bfloat16: half the bytes of float32."""

    def __init__(self, kind: str):
        super().__init__()
        self._hook = HALF_HOOKS[kind]

    def attach(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(None, self._reduce)

    def _reduce(self, state: object, bucket: dist.GradBucket) -> Future:
        self.traffic.plain_bytes += bucket.buffer().nbytes
        self.traffic.sent_bytes += bucket.buffer().numel() * HALF_BYTES
        return self._hook(None, bucket)
