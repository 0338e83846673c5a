"""The base strategy, for a single process, and DataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer

from lockstep.diagnosis.phases import Phase
from lockstep.world import accelerator

Tensors = dict[str, torch.Tensor]


@dataclass
class Traffic:
    """Bytes of gradients that this worker sent in collectives since the last `take`, and their uncompressed size."""

    plain_bytes: int = 0
    sent_bytes: int = 0

    def take(self) -> Traffic:
        """Return the counts and reset them."""
        taken = Traffic(self.plain_bytes, self.sent_bytes)
        self.plain_bytes = self.sent_bytes = 0
        return taken


class Strategy:
    """The interface between the training loop and a strategy; this one is for a single worker."""

    name = "single"
    workers_averaged = 1
    """Number of workers over which gradients are averaged; scale the loss by it to get the mean over all samples."""

    remembers_gradients = False
    """Whether gradients affect what later steps send, so that an overflow must be known before the next step."""
    waits_in: tuple[Phase, ...] = ("reduction",)
    """Phases of a step in which this worker may wait for others."""
    gathers_state = False
    """Whether workers have different states, so that a snapshot can be taken only on rank 0."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """Bytes before and after compression; 0 without compression."""

    def synchronize_batch_norm(self, model: nn.Module) -> None:
        """Make the model's batch norms compute statistics over all workers."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training."""
        return model

    def build_optimizer(
        self, kind: type[Optimizer], groups: Sequence[dict[str, Any]], settings: Mapping[str, Any]
    ) -> Optimizer:
        """Build an optimizer of a class over parameter groups."""
        return kind(groups, **settings)

    def mark_reduction(self, losses: torch.Tensor, mark: Callable[[], None]) -> None:
        """Call `mark` in the backward pass of `losses` when it begins to wait for other workers, if it does."""

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Surround each forward and backward pass of a step; gradients need to be reduced only in the last one."""
        return nullcontext()

    def finish_gradients(self) -> None:
        """Wait after the last backward pass until the gradients are reduced."""

    def forget_gradients(self) -> None:
        """Drop state derived from gradients, after one was NaN or infinite."""

    def rescale(self, factor: float) -> None:
        """Scale state derived from gradients by `factor`, because the loss scale changed."""

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy rank 0's values to all replicas, in place: initial weights, batch norm statistics before evaluations."""

    def state_dict(self) -> Tensors:
        """Return the state of all workers for a checkpoint, on rank 0 at least. Collective."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a state of any number of workers."""

    def close(self) -> None:
        """Release resources at the end of the run."""


def mark_before_wait(losses: torch.Tensor, mark: Callable[[], None]) -> None:
    """Call `mark` at the end of the backward pass of `losses`, before the strategy's wait for other workers.

    Strategies queue their wait with a gradient of a parameter, so this call precedes it, except in a nested backward
    pass (checkpoints with use_reentrant=True).
    """
    losses.register_hook(lambda _: Variable._execution_engine.queue_callback(mark))


class DataParallelStrategy(Strategy):
    """torch's nn.DataParallel; with at most one GPU, the plain module. The batch size is per process."""

    name = "dp"

    def wrap(self, model: nn.Module) -> nn.Module:
        kinds = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
        return Parallel(model, kinds.pop()) if kinds and accelerator.count() > 1 else model


class Parallel(nn.DataParallel[nn.Module]):
    """DataParallel whose threads autocast to the caller's dtype; torch's version uses the default, float16."""

    def __init__(self, model: nn.Module, device_type: str):
        super().__init__(CallersAutocast(model, device_type))

    def forward(self, *inputs: Any) -> Any:
        cast(CallersAutocast, self.module).follow()
        return super().forward(*inputs)


class CallersAutocast(nn.Module):
    """A module with the autocast settings of the thread that called `follow`."""

    def __init__(self, model: nn.Module, device_type: str):
        super().__init__()
        self.model = model
        self._device_type = device_type
        self.follow()

    def follow(self) -> None:
        """Read this thread's autocast settings."""
        self._enabled = torch.is_autocast_enabled(self._device_type)
        self._dtype = torch.get_autocast_dtype(self._device_type)

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=self._enabled):
            return self.model(*inputs)
