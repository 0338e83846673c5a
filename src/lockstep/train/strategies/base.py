"""The base strategy: one worker, whose gradients are already the whole batch's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Tensors = dict[str, torch.Tensor]


@dataclass
class Traffic:
    """Bytes of gradients that this worker has put into collectives since it last asked, and what they were before."""

    plain_bytes: int = 0
    sent_bytes: int = 0

    def take(self) -> Traffic:
        """The bytes so far; counting begins anew."""
        taken = Traffic(self.plain_bytes, self.sent_bytes)
        self.plain_bytes = self.sent_bytes = 0
        return taken


class Strategy:
    """What the training loop asks of a strategy, done for a single worker."""

    name = "single"
    workers_averaged = 1
    """Workers over which gradients are averaged: what a loss must be scaled by for its mean to be over all samples."""

    remembers_gradients = False
    """Whether one step's gradients change what later ones send, so that an overflow must be known before the next."""
    gathers_state = False
    """Whether a snapshot needs `gather_state`, and so can be taken on rank 0 alone."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """What a compression saves; stays 0 without one."""

    def synchronize_batch_norm(self, model: nn.Module) -> nn.Module:
        """The model with batch norm's statistics taken over all workers."""
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training."""
        return model

    def build_optimizer(
        self, kind: type[Optimizer], groups: Sequence[dict[str, Any]], settings: Mapping[str, Any]
    ) -> Optimizer:
        """An optimizer of that kind over those parameter groups."""
        return kind(groups, **settings)

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Around each forward and backward pass of a step; gradients need to travel in the last one only."""
        return nullcontext()

    def finish_gradients(self) -> None:
        """After the last backward pass: gradients are complete when this returns."""

    def forget_gradients(self) -> None:
        """A gradient was infinite or not a number: drop what is kept of it for later steps."""

    def rescale(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on, because the loss scale has changed."""

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every replica rank 0's values, in place: weights at first, batch norm's statistics to evaluate with."""

    def gather_state(self, optimizer: Optimizer) -> None:
        """Before rank 0 takes a snapshot, on all workers: bring there what the others alone have."""

    def state_dict(self) -> Tensors:
        """On rank 0, after `gather_state`: what a checkpoint must remember of all workers."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Go on from a state, that of any number of workers."""

    def close(self) -> None:
        """The run is over."""
