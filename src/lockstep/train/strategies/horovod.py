"""Horovod: gradients are reduced by name, by Lockstep's implementation of `horovod.torch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

import lockstep.hvd as hvd
from lockstep.hvd.compression import Compressor
from lockstep.hvd.optimizer.gradient_reducer import Gradients
from lockstep.hvd.optimizer.reductions import GradientOptions
from lockstep.hvd.sync_batch_norm import HorovodPeers
from lockstep.models.global_batch_norm import GlobalBatchNorm, check_batch_norm, convert_batch_norm
from lockstep.run.data_parallel import broadcast
from lockstep.train.strategies.base import Strategy, mark_before_wait
from lockstep.train.strategies.ddp import HALF_BYTES
from lockstep.world.world import World

NEVER = 1 << 30  # backward passes before a reduction, to defer it to a later pass


class BF16Compressor(Compressor):
    """Sends floating-point tensors as bfloat16. `Gradients` converts them, and calls no method."""

    sent_dtype = torch.bfloat16


COMPRESSIONS: dict[str, type[Compressor]] = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "bf16": BF16Compressor,
}


class HorovodStrategy(Strategy):
    """The reduction of hvd.DistributedOptimizer: fused buckets, overlapped with the backward pass.

    The optimizer itself is not used, because it would reduce the gradients of the parameters that it updates. With
    master weights (O2) these are not the model's.
    """

    name = "horovod"

    def __init__(self, world: World, compress: str):
        super().__init__()
        self._world = world
        self._compress = compress
        self.workers_averaged = world.size
        self._gradients: Gradients | None = None
        self._parameters: list[nn.Parameter] = []
        hvd.init()

    def synchronize_batch_norm(self, model: nn.Module) -> None:
        check_batch_norm(model)
        if self._world.size > 1:
            convert_batch_norm(model, GlobalBatchNorm, peers=HorovodPeers())

    def wrap(self, model: nn.Module) -> nn.Module:
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if trained and self._world.size > 1:
            self._gradients = Gradients(trained, GradientOptions(COMPRESSIONS[self._compress]))
            self._parameters = [parameter for _, parameter in trained]
        return model

    def mark_reduction(self, losses: torch.Tensor, mark: Callable[[], None]) -> None:
        if self._gradients is not None:
            mark_before_wait(losses, mark)

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        if self._gradients is not None:
            self._gradients.set_passes(1 if is_last else NEVER)
        return nullcontext()

    def finish_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.finish()
            if self._compress != "none":
                self.traffic.plain_bytes += sum([parameter.nbytes for parameter in self._parameters])
                self.traffic.sent_bytes += sum([parameter.numel() for parameter in self._parameters]) * HALF_BYTES

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        broadcast(self._world, tensors)

    def close(self) -> None:
        hvd.shutdown()
